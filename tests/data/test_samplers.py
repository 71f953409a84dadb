from __future__ import annotations

import pytest

from megatron_lite.data.samplers import microbatch_indices


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
