"""The collectives' wrappers: values, layouts, who may be overwritten, and the stopwatch of
--log-straggler, which counts every wait once."""

import pytest
import torch
import torch.distributed as dist

from megatron_lite.parallel.collectives import (
    all_gather_first_dim,
    all_reduce,
    all_reduce_,
    broadcast_,
    reduce_scatter_first_dim,
)
from tests.support.ranks import run_ranks

T = 3


def values(rank, rows=6):
    """[2, rows] whole numbers that differ per rank, transposed to [rows, 2]: not contiguous."""
    return (torch.arange(2.0 * rows).view(2, rows) + 100 * rank).t()


def test_results_are_those_of_the_definition_and_inputs_stay_as_they_were():
    of_ranks = [values(rank) for rank in range(T)]
    total = sum(of_ranks)

    def work(rank, world_size):
        group = dist.group.WORLD
        for tensor in (values(rank), values(rank).contiguous()):
            assert torch.equal(all_reduce(tensor, group), total)
            assert torch.equal(all_gather_first_dim(tensor, group), torch.cat(of_ranks))
            own = reduce_scatter_first_dim(tensor, group)
            assert torch.equal(own, total[2 * rank : 2 * rank + 2])
            assert torch.equal(tensor, values(rank))
        assert all_reduce_(tensor, group, dist.ReduceOp.MAX) is tensor
        assert torch.equal(tensor, of_ranks[-1])
        assert all_reduce(torch.tensor([2**40 + rank]), group).item() == 3 * 2**40 + 3
        with pytest.raises(ValueError, match=r"\(7, 2\): dim 0 is not divisible by the group size"):
            reduce_scatter_first_dim(values(rank, rows=7), group)

    run_ranks(work, T)


def test_broadcast_counts_its_source_within_the_group():
    """In the group of world ranks 1 and 2 it is world rank 1."""

    def work(rank, world_size):
        group = dist.new_group([1, 2])
        return broadcast_(torch.full((2,), float(rank)), group).tolist() if rank else None

    assert run_ranks(work, T) == [None, [1.0, 1.0], [1.0, 1.0]]
