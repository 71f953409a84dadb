"""The order in which the samples of a dataset are read: `--dataloader-type`.

single reads them in their order. An example with a global batch of 8 at 24 consumed samples,
micro-batches of 2 and 2 ranks:

    micro-batch    rank 0    rank 1
    0              24 25     26 27
    1              28 29     30 31

An iteration reads [consumed, consumed + global batch) at every data-parallel size. Therefore a run
can go on with the same data on another number of ranks. Every evaluation uses the same rule, and
starts at sample 0.

cyclic is Megatron's random order, number for number. Each pass over the dataset ("epoch") has its
own permutation, torch's of a generator whose seed is the number of the epoch; --seed has no part in
it. The samples at the end that fill no step of all ranks (micro-batch size x data-parallel size)
are left out. The order is a function of the samples consumed before, so that a resumed run reads
what it would have read. Two ways to share a permutation:

    a range for each rank    rank r permutes [r * n, (r + 1) * n) of the samples. Another
                             data-parallel size gives another order.
    --no-data-sharding       rank r takes the places r, r + dp, r + 2 dp, .. of one permutation. A
                             global batch has the same samples at every data-parallel size as long
                             as the sizes leave the same number of samples out of an epoch.

The rest of an epoch may fill a micro-batch on some ranks and not on others. Megatron then reads it
on those ranks, except in a run that is resumed at that place. Here no run reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig


def microbatch_indices(
    consumed_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int, microbatch: int
) -> range:
    """Returns the samples of one micro-batch.

    consumed_samples: how many samples were consumed before the iteration.
    microbatch: the number of the micro-batch in the iteration.
    """
    start = consumed_samples + (microbatch * dp_size + dp_rank) * micro_batch_size
    return range(start, start + micro_batch_size)


class SampleOrder(Protocol):
    """Maps a micro-batch to its samples. The arguments are those of `microbatch_indices`."""

    def __call__(
        self,
        consumed_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        microbatch: int,
        /,
    ) -> Sequence[int]: ...


class CyclicOrder:
    """The cyclic order of `num_samples` samples.

    sharded: whether each data-parallel rank permutes a range of its own.
    It keeps the permutation of the epoch that was read last, 4 bytes a sample (8 from 2^31 samples
    on).
    """

    def __init__(self, num_samples: int, *, sharded: bool) -> None:
        self._num_samples, self._sharded = num_samples, sharded
        self._key: tuple[int, int] | None = None
        self._permutation = np.empty(0, np.int32)

    def __call__(
        self,
        consumed_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        microbatch: int,
        /,
    ) -> list[int]:
        """Returns the samples of one micro-batch.

        Raises InputError if the samples consumed before fill no whole steps, or if the dataset is
        shorter than one step.
        """
        step = micro_batch_size * dp_size
        if consumed_samples % step:
            raise InputError(
                f"--dataloader-type cyclic: {consumed_samples} consumed samples are no multiple of "
                f"--micro-batch-size {micro_batch_size} x {dp_size} data-parallel ranks: resume "
                "with the sizes of the run that saved the checkpoint"
            )
        if self._num_samples < step:
            raise InputError(
                f"--dataloader-type cyclic: the {self._num_samples} samples of the data are fewer "
                f"than --micro-batch-size {micro_batch_size} x {dp_size} data-parallel ranks"
            )
        in_epoch = self._num_samples - self._num_samples % step
        epoch, place = divmod(consumed_samples + microbatch * step, in_epoch)
        if self._sharded:
            length = in_epoch // dp_size
            start = place // dp_size
            taken = self._permuted(epoch, length)[start : start + micro_batch_size]
            return (taken.astype(np.int64) + dp_rank * length).tolist()
        # Megatron permutes all whole micro-batches here, although an epoch reads whole steps.
        permuted = self._permuted(epoch, self._num_samples // micro_batch_size * micro_batch_size)
        return permuted[place + dp_rank : place + step : dp_size].tolist()

    def _permuted(self, epoch: int, length: int) -> np.ndarray:
        if self._key != (epoch, length):
            generator = torch.Generator()
            generator.manual_seed(epoch)
            permutation = torch.randperm(length, generator=generator).numpy()
            narrow = length <= np.iinfo(np.int32).max
            self._permutation = permutation.astype(np.int32) if narrow else permutation
            self._key = (epoch, length)
        return self._permutation


def sample_order(data: DataConfig, num_samples: int) -> SampleOrder:
    """Returns the order in which a dataset of `num_samples` samples is read."""
    if data.dataloader_type == "cyclic":
        return CyclicOrder(num_samples, sharded=data.data_sharding)
    return microbatch_indices
