"""Tests of run_ranks: results in order, failures with their traceback, and no process left over."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.forks import leave
from tests.support.limits import HANG_S, patiently
from tests.support.ranks import RankFailure, run_ranks


@pytest.fixture(autouse=True)
def _no_process_outlives_a_test() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def test_results_come_back_in_rank_order_from_one_group() -> None:
    def work(rank: int, world_size: int, base: int) -> Any:
        total = torch.tensor([base + rank])
        dist.all_reduce(total)
        return rank, world_size, int(total)

    assert run_ranks(work, 3, 10) == [(0, 3, 33), (1, 3, 33), (2, 3, 33)]


def test_backward_runs_in_the_ranks_after_it_ran_in_the_parent() -> None:
    torch.randn(64, 64, requires_grad=True).square().sum().backward()

    def work(rank: int, world_size: int) -> Any:
        x = torch.full((400, 400), 1.0, requires_grad=True)
        (x @ x).sum().backward()
        return float(x.grad[0, 0])

    assert run_ranks(work, 2) == [800.0, 800.0]


def test_a_failing_rank_is_named_with_its_traceback_while_the_others_wait() -> None:
    def fail_on_rank_one(rank: int, world_size: int) -> Any:
        if rank == 1:
            raise KeyError("the reason")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(
        RankFailure, match=r"(?s)rank 1 of 3 failed.*in fail_on_rank_one.*KeyError: 'the reason'"
    ):
        run_ranks(fail_on_rank_one, 3)
    assert time.monotonic() - start < 0.7 * HANG_S


def test_a_hang_ends_with_the_stack_of_the_ranks_that_hang() -> None:
    def hang_on_rank_zero(rank: int, world_size: int) -> Any:
        while rank == 0:
            pass

    def check(limit: float) -> None:
        with pytest.raises(
            RankFailure, match=rf"(?s)did not return in {limit:g} s.*rank 0:.*hang_on_rank_zero"
        ):
            run_ranks(hang_on_rank_zero, 2, timeout=limit)

    patiently(check, 1)


def test_a_rank_that_dies_without_a_word_is_named() -> None:
    def die_on_the_last_rank(rank: int, world_size: int) -> Any:
        if rank == 1:
            leave(7)
        while True:
            pass

    with pytest.raises(RankFailure, match="rank 1 of 2 died with exit code 7"):
        run_ranks(die_on_the_last_rank, 2)


def test_unequal_collectives_are_an_error_not_a_wrong_result() -> None:
    def reduce_unequal_sizes(rank: int, world_size: int) -> Any:
        dist.all_reduce(torch.ones(2 + rank))

    with pytest.raises(RankFailure, match="Detected mismatch between collectives"):
        run_ranks(reduce_unequal_sizes, 2, detail=True)
