"""The collectives' wrappers: values, layouts, who may be overwritten, and that a group of one sends
nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_lite.parallel.collectives import (
    all_gather_first_dim,
    all_gather_into_,
    all_reduce,
    all_reduce_,
    broadcast_,
    reduce_scatter_first_dim,
    reduce_scatter_into_,
)
from tests.support.ranks import run_ranks

T = 3


def values(rank, rows=6):
    """[2, rows] whole numbers that differ per rank, transposed to [rows, 2]: not contiguous."""
    return (torch.arange(2.0 * rows).view(2, rows) + 100 * rank).t()


def on_ranks(fn):
    return run_ranks(lambda rank, world_size: fn(rank, dist.group.WORLD), T)


def test_all_reduce_sums_into_a_new_tensor():
    def work(rank, group):
        tensor = values(rank)
        result = all_reduce(tensor, group)
        assert torch.equal(tensor, values(rank))
        return result

    for result in on_ranks(work):
        assert torch.equal(result, sum(values(rank) for rank in range(T)))


def test_all_reduce_in_place_writes_into_its_argument_and_takes_an_operator():
    def work(rank, group):
        tensor = values(rank).contiguous()
        assert all_reduce_(tensor, group, dist.ReduceOp.MAX) is tensor
        return tensor

    for result in on_ranks(work):
        assert torch.equal(result, values(T - 1))


def test_all_gather_joins_the_first_dim_in_rank_order():
    for result in on_ranks(lambda rank, group: all_gather_first_dim(values(rank), group)):
        assert torch.equal(result, torch.cat([values(rank) for rank in range(T)]))


def test_reduce_scatter_gives_each_rank_its_rows_of_the_sum():
    total = sum(values(rank) for rank in range(T))
    for rank, result in enumerate(
        on_ranks(lambda rank, group: reduce_scatter_first_dim(values(rank), group))
    ):
        assert torch.equal(result, total[2 * rank : 2 * rank + 2])


def test_gathers_and_sums_into_a_buffer_leave_what_is_sent_alone():
    def work(rank, group):
        whole = torch.arange(7.0 * T) * (rank + 1)
        before, own = whole.clone(), torch.empty(7)
        reduce_scatter_into_(own, whole, group)
        assert torch.equal(whole, before)
        gathered = torch.full((7 * T,), -1.0)
        # FSDP2 hands over a part of the buffer itself
        part = gathered[7 * rank : 7 * rank + 7].copy_(own)
        all_gather_into_(gathered, part, group)
        return own, gathered

    total = torch.arange(7.0 * T) * sum(range(1, T + 1))
    for rank, (own, gathered) in enumerate(on_ranks(work)):
        assert torch.equal(own, total[7 * rank : 7 * rank + 7]) and torch.equal(gathered, total)


def test_reduce_scatter_of_rows_that_do_not_split_is_an_error():
    def work(rank, group):
        with pytest.raises(
            ValueError, match=r"\(7, 2\): dim 0 is not divisible by the group size 3"
        ):
            reduce_scatter_first_dim(values(rank, rows=7), group)

    on_ranks(work)


def test_gather_and_scatter_leave_their_input_alone():
    def work(rank, group):
        tensor = values(rank).contiguous()
        all_gather_first_dim(tensor, group)
        reduce_scatter_first_dim(tensor, group)
        assert torch.equal(tensor, values(rank))

    on_ranks(work)


def test_broadcast_counts_its_source_within_the_group():
    """In the group of world ranks 1 and 2, source 1 is world rank 2."""

    def work(rank, world_size):
        group = dist.new_group([1, 2])
        tensor = torch.full((2,), float(rank))
        return broadcast_(tensor, group, group_source=1).tolist() if rank else None

    assert run_ranks(work, T) == [None, [2.0, 2.0], [2.0, 2.0]]


def test_bf16_and_integers_pass_through():
    def work(rank, group):
        return (
            all_reduce(torch.tensor([rank], dtype=torch.bfloat16), group),
            all_reduce(torch.tensor([2**40 + rank]), group),
            all_gather_first_dim(torch.tensor([rank], dtype=torch.bfloat16), group),
        )

    for bf16, integer, gathered in on_ranks(work):
        assert bf16.dtype == torch.bfloat16 and bf16.item() == 3
        assert integer.item() == 3 * 2**40 + 3 and gathered.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "collective",
    [all_reduce, all_reduce_, all_gather_first_dim, reduce_scatter_first_dim, broadcast_],
)
def test_a_group_of_one_hands_the_very_tensor_back(collective):
    tensor = values(1)
    assert collective(tensor, None) is tensor
    assert torch.equal(tensor, values(1))
