"""Micro-batches of token ids on this rank's device, and what the ends of documents mean for them.

    --eod-mask-loss           a token that ends a document does not count in the loss
    --reset-position-ids      learned positions begin at 0 again after such a token
    --reset-attention-mask    a token reads no token of an earlier document

The masks, positions and starts are those of `_get_ltor_masks_and_position_ids` in megatron-core.
Every pipeline stage reads the samples and computes them itself, so no stage sends them to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.config.run import RunConfig
from megatron_lite.data.tokenizers import build_tokenizer
from megatron_lite.model.documents import NO_DOCUMENTS, Documents
from megatron_lite.parallel.sequence_spans import select, spans_of
from megatron_lite.parallel.state import ParallelState
from megatron_lite.training.sample_order import SampleOrder, microbatch_indices


class SampleDataset(Protocol):
    """A dataset that maps a sample's number to its s+1 token ids, int64."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...


class MicroBatch(NamedTuple):
    """tokens and labels: token ids, each [b, s/c]. Labels are the tokens one position later.

    loss_mask: [b, s/c] float32, 1 for a token that counts in the loss and 0 for another. None: all
        count.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor | None = None
    documents: Documents = NO_DOCUMENTS


class Batches(Protocol):
    """The micro-batches of a step, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> MicroBatch: ...


def cut(
    samples: Tensor, *, cp_rank: int = 0, cp_size: int = 1, rules: DocumentRules | None = None
) -> MicroBatch:
    """Returns one context-parallel rank's spans of samples [b, s + 1] as a micro-batch.

    rules: what the ends of documents mean; None: nothing.
    """
    # `select` copies even where a slice is contiguous (a batch of one sample). Backward saves the
    # tokens, and a view would keep the storage of the whole sample alive.
    spans = spans_of(samples.shape[1] - 1, rank=cp_rank, size=cp_size)
    batch = MicroBatch(select(samples[:, :-1], spans, 1), select(samples[:, 1:], spans, 1))
    if rules is None:
        return batch
    if rules.mask_loss:
        batch = batch._replace(loss_mask=(batch.tokens != rules.eod).float())
    if not (rules.reset_positions or rules.reset_attention):
        return batch
    starts, position_ids = document_starts(samples[:, :-1], rules.eod), None
    if rules.reset_positions:
        places = torch.arange(starts.shape[1], device=starts.device)
        position_ids = select(places - starts, spans, 1)
    documents = Documents(position_ids, starts if rules.reset_attention else None)
    return batch._replace(documents=documents)


@dataclass(frozen=True, kw_only=True)
class DocumentRules:
    """The id that ends a document, and which of the three flags are in force."""

    eod: int
    mask_loss: bool = False
    reset_positions: bool = False
    reset_attention: bool = False


def document_rules(config: RunConfig) -> DocumentRules | None:
    """Returns the rules of a run, or None if it treats the ends of documents like other tokens.

    Raises InputError if the tokenizer has no end-of-document token.
    """
    data = config.data
    given = [
        name
        for name, value in (
            ("--eod-mask-loss", data.eod_mask_loss),
            ("--reset-position-ids", data.reset_position_ids),
            ("--reset-attention-mask", data.reset_attention_mask),
        )
        if value
    ]
    if not given:
        return None
    try:
        eod = build_tokenizer(config.tokenizer).eod
    except InputError as error:
        raise InputError(f"{' and '.join(given)} needs the end of documents: {error}") from error
    return DocumentRules(
        eod=eod,
        mask_loss=data.eod_mask_loss,
        # Rotary tables follow the place in the sequence, as in Megatron.
        reset_positions=data.reset_position_ids and config.model.positions.learned,
        reset_attention=data.reset_attention_mask,
    )


def document_starts(tokens: Tensor, eod: int) -> Tensor:
    """Returns for each token of [b, s] the place of the first token of its document, int64."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    begins = torch.zeros_like(tokens)
    # The place of each token that begins a document, and 0 for all others. The largest number up
    # to a token is then the start of its document.
    begins[:, 1:] = places[1:] * (tokens[:, :-1] == eod)
    return begins.cummax(1).values


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """This rank's micro-batches of the iteration that starts after `consumed_samples`.

    Each is read when it is indexed. A sample that cannot be read raises InputError, whose message
    starts with `where`. Tensor- and context-parallel ranks read the same samples; all of them but
    the first raise PeerError, so that one rank reports the fault.

    order: the samples of a micro-batch; the default reads them in their order.
    """

    dataset: SampleDataset
    consumed_samples: int
    micro_batch_size: int
    num_microbatches: int
    parallel: ParallelState
    where: str = "evaluation"
    order: SampleOrder = microbatch_indices
    rules: DocumentRules | None = None

    def __len__(self) -> int:
        return self.num_microbatches

    def __getitem__(self, number: int) -> MicroBatch:
        parallel = self.parallel
        samples = torch.from_numpy(np.stack(self._read(number)))
        if parallel.device.type == "cuda":  # an asynchronous copy, from pinned memory
            samples = samples.pin_memory().to(parallel.device, non_blocking=True)
        return cut(samples, cp_rank=parallel.cp_rank, cp_size=parallel.cp_size, rules=self.rules)

    def counts(self) -> list[int]:
        """Returns how many tokens of each micro-batch count in the loss, on all its ranks.

        Reads all samples once more, on the host.
        """
        assert self.rules is not None and self.rules.mask_loss
        eod = self.rules.eod
        return [
            sum(int(np.count_nonzero(sample[:-1] != eod)) for sample in self._read(number))
            for number in range(self.num_microbatches)
        ]

    def _read(self, number: int) -> list[np.ndarray]:
        """Returns the samples of a micro-batch. An InputError says where they were to be read."""
        parallel = self.parallel
        indices: Sequence[int] = ()
        ranks = parallel.dp_rank, parallel.dp_size
        try:
            indices = self.order(self.consumed_samples, self.micro_batch_size, *ranks, number)
            return [self.dataset[index] for index in indices]
        except InputError as error:
            kind = PeerError if parallel.tp_rank or parallel.cp_rank else InputError
            place = self.where
            if isinstance(indices, range):
                place += f", samples {indices.start} to {indices.stop - 1}"
            elif indices:
                place += f", samples {', '.join(map(str, indices))}"
            raise kind(f"{place}: {error}") from error
