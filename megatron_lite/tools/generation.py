"""Loads the model of a checkpoint and continues a text with it: the work of `generate`.

The tensor-parallel size is the number of ranks, at any parallel size of the checkpoint.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.checkpointing.shards import SavedStep
from megatron_lite.checkpointing.start import find_step
from megatron_lite.checkpointing.state import load_weights
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.checks import InputError, input_faults
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.data.tokenizer_files import read_from
from megatron_lite.data.tokenizers import Tokenizer, build_tokenizer
from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.collectives import broadcast_
from megatron_lite.parallel.launch import read_launch
from megatron_lite.parallel.messages import silent_unless
from megatron_lite.parallel.rng import derive_seed
from megatron_lite.parallel.state import ParallelState, parallel_state
from megatron_lite.training.build_trainer import build_model

from .generate import Sampling

# --- the checkpoint ---


def config_for_ranks(saved: RunConfig, num_ranks: int, backend: str) -> RunConfig:
    """Returns the saved run's config for `num_ranks` tensor-parallel ranks.

    Sequence parallelism is off, because it needs context lengths that the ranks divide. The norms
    are torch's, which run anywhere. Recomputation is off: no backward runs, and a policy may name
    stages that these ranks do not have.
    Raises InputError if the model does not divide over the ranks.
    """
    parallel = ParallelConfig(tensor_model_parallel_size=num_ranks, distributed_backend=backend)
    with input_faults(
        after=": the tensor-parallel size is the number of ranks started, start another number"
    ):
        return replace(
            saved, parallel=parallel, recompute=RecomputeConfig(), checkpoint=CheckpointConfig()
        )


def load_model(saved: SavedStep, config: RunConfig, parallel: ParallelState) -> GPTModel:
    """Returns this rank's shard of the saved model, in evaluation mode (no dropout)."""
    model = build_model(config, parallel)
    load_weights(saved, parallel, model)
    model.eval()
    return model


# --- the texts ---


def run(args: argparse.Namespace) -> None:
    """Continues the prompt of a parsed command line. Rank 0 prints."""
    saved, notices = find_step(args.load)
    num_ranks = dist.get_world_size() if dist.is_initialized() else read_launch().world_size
    backend = getattr(args, "distributed_backend", "auto")
    config = config_for_ranks(saved.config, num_ranks, backend)
    tokenizer = build_tokenizer(read_from(config.tokenizer, saved.path))
    model_size = config.tokenizer.true_vocab_size
    if tokenizer.fewest_ids > model_size:
        raise InputError(
            f"the tokenizer has {tokenizer.fewest_ids} ids, the model {model_size}: it is not the "
            "one that the model was trained with"
        )
    try:
        eod = tokenizer.eod
    except InputError:
        eod = None
    with (
        parallel_state(config.parallel, seed=args.seed) as parallel,
        silent_unless(parallel.rank == 0),
    ):
        model = load_model(saved, config, parallel)
        for notice in notices:
            print(notice, file=sys.stderr)
        window = config.data.seq_length
        with input_faults():
            tokens = tokenizer.tokenize(args.prompt)
        if max(tokens, default=0) >= model_size:
            raise InputError(
                f"--prompt has the token {max(tokens)}, and the model {model_size} ids: leave out "
                f"{tokenizer.detokenize([max(tokens)])!r}"
            )
        if not tokens and eod is not None:  # an empty prompt is the start of a document
            tokens = [eod]
        if not tokens:
            raise InputError(
                "--prompt is empty and the tokenizer has no end-of-document token to start from: "
                "give a text"
            )
        if len(tokens) + args.sampling.max_new_tokens > window:
            print(
                f"note: the model sees the last {window} tokens only (its --seq-length), fewer "
                f"than the prompt's {len(tokens)} and --max-new-tokens "
                f"{args.sampling.max_new_tokens} together",
                file=sys.stderr,
            )
        new_tokens = generate_tokens(
            # A model may have more ids than its tokenizer (--vocab-size), which have no text.
            lambda ids: model(ids)[..., : tokenizer.vocab_size],
            tokens,
            sampling=args.sampling,
            window=window,
            eod=eod,
            generator=torch.Generator().manual_seed(derive_seed(args.seed, 0)),
            parallel=parallel,
        )
        for piece in chain([args.prompt], text_pieces(tokenizer, tokens, new_tokens), ["\n"]):
            print(piece, end="", flush=True)


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


# --- the tokens ---


def generate_tokens(
    model: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    *,
    sampling: Sampling,
    window: int,
    eod: int | None,
    generator: torch.Generator,
    parallel: ParallelState,
) -> Iterator[int]:
    """Yields the new tokens, as many as `sampling` allows. Ends before `eod`.

    model: maps [1, n] ids to [1, n, V] logits.
    Every rank must consume the iterator in step: each token is one broadcast over the TP group.
    Raises InputError if the logits are not finite.
    """
    tokens = list(prompt)
    for _ in range(sampling.max_new_tokens):
        with torch.inference_mode():
            context = torch.tensor([tokens[-window:]], device=parallel.device)
            logits = model(context)[0, -1].float().cpu()
        if not logits.isfinite().all():
            raise InputError(
                "the model's logits are not finite: its training has diverged. Name an earlier "
                f"iteration in {LATEST}"
            )
        chosen = torch.tensor([next_token(logits, sampling, generator)], device=parallel.device)
        token = int(broadcast_(chosen, parallel.tp_group))
        if token == eod:
            return
        tokens.append(token)
        yield token


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
