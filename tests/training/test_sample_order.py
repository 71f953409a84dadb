"""`--dataloader-type cyclic` reads what Megatron's random sampler reads, from any point on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.training.batches import CyclicOrder, microbatch_indices


def walked(
    total: int, consumed: int, micro: int, rank: int, ranks: int, *, sharded: bool
) -> Iterator[list[int]]:
    """The rule as a walk: each epoch lists this rank's samples, and cuts them into micro-batches.

    The walk goes on after an epoch with what a run reads that is resumed there.
    """
    step = micro * ranks
    whole = total - total % step
    while True:
        epoch, done = divmod(consumed, whole)
        generator = torch.Generator()
        generator.manual_seed(epoch)
        if sharded:
            size = total // step * micro
            order = torch.randperm(size, generator=generator).tolist()
            mine = [rank * size + number for number in order[done // ranks :]]
        else:
            order = torch.randperm(total // micro * micro, generator=generator).tolist()
            mine = order[done:][rank::ranks]
        for start in range(0, (whole - done) // ranks, micro):
            yield mine[start : start + micro]
        consumed = (epoch + 1) * whole


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(
    ("total", "micro", "ranks"), [(23, 2, 3), (24, 2, 3), (7, 1, 1), (50, 4, 2), (31, 2, 4)]
)
def test_every_rank_reads_what_the_walk_reads_from_every_point(
    total: int, micro: int, ranks: int, sharded: bool
) -> None:
    order, step = CyclicOrder(total, sharded=sharded), micro * ranks
    for consumed in range(0, 4 * total, step):
        consumed -= consumed % step
        for rank in range(ranks):
            expected = list(islice(walked(total, consumed, micro, rank, ranks, sharded=sharded), 5))
            assert [order(consumed, micro, rank, ranks, number) for number in range(5)] == expected
            # the same from a resume at each of the micro-batches
            assert [
                order(consumed + number * step, micro, rank, ranks, 0) for number in range(5)
            ] == expected


def test_a_resume_within_a_step_and_too_little_data_are_errors() -> None:
    order = CyclicOrder(24, sharded=True)
    with pytest.raises(InputError, match=r"18 consumed samples are no multiple of .* 4 x 2 data-"):
        order(18, 4, 0, 2, 0)
    with pytest.raises(InputError, match="24 samples of the data are fewer"):
        order(0, 25, 0, 1, 0)


def iteration(
    consumed: int, batch_size: int, micro_batch_size: int, dp_size: int
) -> list[list[int]]:
    """What each rank reads in one iteration."""
    return [
        [
            sample
            for microbatch in range(batch_size // (micro_batch_size * dp_size))
            for sample in microbatch_indices(consumed, micro_batch_size, rank, dp_size, microbatch)
        ]
        for rank in range(dp_size)
    ]


@pytest.mark.parametrize(
    ("micro_batch_size", "dp_size"), [(1, 1), (2, 1), (1, 3), (2, 3), (4, 3), (3, 4), (1, 12)]
)
def test_an_iteration_reads_the_same_samples_at_every_data_parallel_size(
    micro_batch_size: int, dp_size: int
) -> None:
    ranks = iteration(36, 12, micro_batch_size, dp_size)
    assert sorted(sample for rank in ranks for sample in rank) == list(range(36, 48))


def test_a_rank_takes_contiguous_slices_of_each_step() -> None:
    assert iteration(24, 8, 2, 2) == [[24, 25, 28, 29], [26, 27, 30, 31]]
