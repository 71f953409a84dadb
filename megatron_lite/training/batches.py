"""Micro-batches of token ids on this rank's device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.data.samplers import microbatch_indices
from megatron_lite.model.documents import NO_DOCUMENTS, Documents
from megatron_lite.parallel.sequence_spans import select, spans_of
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.timing import Timed, not_timed
from megatron_lite.training.document_positions import DocumentRules, document_starts
from megatron_lite.training.sample_order import SampleOrder


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


def fetch(
    dataset: SampleDataset,
    indices: Sequence[int],
    device: torch.device,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    rules: DocumentRules | None = None,
) -> MicroBatch:
    """Returns the samples `indices`, or one context-parallel rank's spans of them.

    The copy to a GPU is asynchronous, from pinned memory.
    """
    samples = torch.from_numpy(np.stack([dataset[index] for index in indices]))
    if device.type == "cuda":
        samples = samples.pin_memory().to(device, non_blocking=True)
    return cut(samples, cp_rank=cp_rank, cp_size=cp_size, rules=rules)


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
class MicroBatches:
    """This rank's micro-batches of the iteration that starts after `consumed_samples`.

    Each is read when it is indexed. A sample that cannot be read raises InputError, whose message
    starts with `where`. Tensor- and context-parallel ranks read the same samples; all of them but
    the first raise PeerError, so that one rank reports the fault.

    order: the samples of a micro-batch; the default reads them in their order.
    timed: times the reading, by the name of training/timers.py.
    """

    dataset: SampleDataset
    consumed_samples: int
    micro_batch_size: int
    num_microbatches: int
    parallel: ParallelState
    where: str = "evaluation"
    order: SampleOrder = microbatch_indices
    timed: Timed = not_timed
    rules: DocumentRules | None = None

    def __len__(self) -> int:
        return self.num_microbatches

    def __getitem__(self, number: int) -> MicroBatch:
        parallel, indices = self.parallel, self._indices(number)
        with self._told(indices), self.timed("batch-generator"):
            return fetch(
                self.dataset,
                indices,
                parallel.device,
                cp_rank=parallel.cp_rank,
                cp_size=parallel.cp_size,
                rules=self.rules,
            )

    def counts(self) -> list[int]:
        """Returns how many tokens of each micro-batch count in the loss, on all its ranks.

        Reads all samples once more, on the host.
        """
        assert self.rules is not None and self.rules.mask_loss
        counts = []
        for indices in map(self._indices, range(self.num_microbatches)):
            with self._told(indices):
                tokens = (self.dataset[index][:-1] for index in indices)
                counts.append(sum(int(np.count_nonzero(one != self.rules.eod)) for one in tokens))
        return counts

    def _indices(self, number: int) -> Sequence[int]:
        parallel = self.parallel
        with self._told(()):
            return self.order(
                self.consumed_samples,
                self.micro_batch_size,
                parallel.dp_rank,
                parallel.dp_size,
                number,
            )

    @contextmanager
    def _told(self, indices: Sequence[int]) -> Iterator[None]:
        """Adds to an InputError where in the run the samples were to be read."""
        parallel = self.parallel
        try:
            yield
        except InputError as error:
            kind = PeerError if parallel.tp_rank or parallel.cp_rank else InputError
            samples = f", {_named(indices)}" if indices else ""
            raise kind(f"{self.where}{samples}: {error}") from error


def _named(indices: Sequence[int]) -> str:
    if isinstance(indices, range):
        return f"samples {indices.start} to {indices.stop - 1}"
    return "samples " + ", ".join(map(str, indices))
