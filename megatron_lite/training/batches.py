"""Micro-batches of token ids on this rank's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.data.samplers import microbatch_indices
from megatron_lite.parallel.sequence_spans import select, spans_of
from megatron_lite.parallel.state import ParallelState
from megatron_lite.training.sample_order import SampleOrder


class SampleDataset(Protocol):
    """A dataset that maps a sample's number to its s+1 token ids, int64."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...


class MicroBatch(NamedTuple):
    """tokens and labels: token ids, each [b, s/c]. Labels are the tokens one position later."""

    tokens: Tensor
    labels: Tensor


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
) -> MicroBatch:
    """Returns the samples `indices`, or one context-parallel rank's spans of them.

    The copy to a GPU is asynchronous, from pinned memory.
    """
    samples = torch.from_numpy(np.stack([dataset[index] for index in indices]))
    if device.type == "cuda":
        samples = samples.pin_memory().to(device, non_blocking=True)
    return cut(samples, cp_rank=cp_rank, cp_size=cp_size)


def cut(samples: Tensor, *, cp_rank: int = 0, cp_size: int = 1) -> MicroBatch:
    """Returns one context-parallel rank's spans of samples [b, s + 1] as a micro-batch."""
    # `select` copies even where a slice is contiguous (a batch of one sample). Backward saves the
    # tokens, and a view would keep the storage of the whole sample alive.
    spans = spans_of(samples.shape[1] - 1, rank=cp_rank, size=cp_size)
    return MicroBatch(*(select(part, spans, 1) for part in (samples[:, :-1], samples[:, 1:])))


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

    def __len__(self) -> int:
        return self.num_microbatches

    def __getitem__(self, number: int) -> MicroBatch:
        parallel = self.parallel
        indices: Sequence[int] = ()
        try:
            indices = self.order(
                self.consumed_samples,
                self.micro_batch_size,
                parallel.dp_rank,
                parallel.dp_size,
                number,
            )
            return fetch(
                self.dataset,
                indices,
                parallel.device,
                cp_rank=parallel.cp_rank,
                cp_size=parallel.cp_size,
            )
        except InputError as error:
            kind = PeerError if parallel.tp_rank or parallel.cp_rank else InputError
            samples = f", {_named(indices)}" if indices else ""
            raise kind(f"{self.where}{samples}: {error}") from error


def _named(indices: Sequence[int]) -> str:
    if isinstance(indices, range):
        return f"samples {indices.start} to {indices.stop - 1}"
    return "samples " + ", ".join(map(str, indices))
