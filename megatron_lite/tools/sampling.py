"""Draws the next tokens of a text from the logits of a model, and turns them into text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config.checks import InputError, require_at_least
from megatron_lite.data.tokenizers import Tokenizer
from megatron_lite.parallel.collectives import broadcast_
from megatron_lite.parallel.state import ParallelState


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The rule that chooses the next token.

    The order is: divide by the temperature, keep the top_k likeliest tokens (0: all), then keep the
    fewest of those whose probabilities reach top_p. `greedy` takes the likeliest token instead.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.9

    def __post_init__(self) -> None:
        require_at_least(self, 0, "top_k")
        if not self.temperature > 0.0:
            raise ValueError(
                f"--temperature must be above 0 (got {self.temperature}): use --greedy for the "
                "likeliest token"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"--top-p must be in (0, 1] (got {self.top_p}): 1 keeps every token")


def token_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Returns the probability of each token after temperature, top-k and top-p.

    The result is [V] float64 and sums to 1. logits: [V].
    """
    ordered, ids = torch.sort(logits.double(), descending=True, stable=True)
    # At most 0: a low temperature cannot overflow upwards.
    ordered = (ordered - ordered[0]) / sampling.temperature
    if sampling.top_k:
        ordered[sampling.top_k :] = -torch.inf
    kept = ordered.softmax(0)
    if sampling.top_p < 1.0:
        # A token is dropped if the tokens before it reach top_p already.
        kept[kept.cumsum(0) - kept >= sampling.top_p] = 0.0
    return torch.zeros_like(kept).scatter_(0, ids, kept / kept.sum())


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Returns one token id. logits: [V], on the CPU.

    Draws one number from the generator, unless greedy. If the logits of two ranks differ only in
    rounding, both draw the same token, except for a draw exactly on the border between two tokens.
    """
    if sampling.greedy:
        return int(logits.argmax())
    cumulative = token_probabilities(logits, sampling).cumsum(0)
    draw = torch.rand(1, dtype=torch.float64, generator=generator) * cumulative[-1]
    return int(torch.searchsorted(cumulative, draw, right=True))


def generate_tokens(
    model: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    window: int,
    eod: int | None,
    generator: torch.Generator,
    parallel: ParallelState,
) -> Iterator[int]:
    """Yields at most `max_new_tokens` new tokens. Ends before `eod`, which it does not yield.

    model: maps [1, n] ids to [1, n, V] logits.
    Every rank must consume the iterator in step: each token is one broadcast over the TP group.
    Raises InputError if the logits are not finite.
    """
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            logits = (
                model(torch.tensor([tokens[-window:]], device=parallel.device))[0, -1].float().cpu()
            )
        if not logits.isfinite().all():
            raise InputError(
                "the model's logits are not finite: its training has diverged. Load an earlier "
                "--iteration"
            )
        chosen = torch.tensor([next_token(logits, sampling, generator)], device=parallel.device)
        token = int(broadcast_(chosen, parallel.tp_group))
        if token == eod:
            return
        tokens.append(token)
        yield token


def text_pieces(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]
) -> Iterator[str]:
    """Yields the text that each token adds.

    A character whose bytes are spread over several tokens comes with the last of them.
    """
    tokens_so_far, shown, text = list(prompt), tokenizer.detokenize(prompt), ""
    for token in tokens:
        tokens_so_far.append(token)
        text = tokenizer.detokenize(tokens_so_far)
        complete = text.rstrip("\N{REPLACEMENT CHARACTER}")
        yield complete[len(shown) :]
        shown = max(shown, complete, key=len)
    yield text[len(shown) :]
