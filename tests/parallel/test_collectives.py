"""The collectives' wrappers: values, layouts, who may be overwritten, and the stopwatch of
--log-straggler, which counts every wait once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lite.parallel import collectives, timing
from megatron_lite.parallel.collectives import (
    KeepsResults,
    all_gather_first_dim,
    all_reduce,
    all_reduce_,
    broadcast_,
    reduce_scatter_first_dim,
    start_all_gather_into_,
    start_reduce_scatter_into_,
    start_shift,
)
from megatron_lite.parallel.timing import WAITING, timed_waiting
from megatron_lite.pipeline.links import Links
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


def test_gathers_and_sums_into_a_buffer_leave_what_is_sent_alone():
    total = torch.arange(7.0 * T) * sum(range(1, T + 1))

    def work(rank, world_size):
        whole = torch.arange(7.0 * T) * (rank + 1)
        before, own, here = whole.clone(), torch.empty(7), slice(7 * rank, 7 * rank + 7)
        start_reduce_scatter_into_(own, whole, dist.group.WORLD).wait()
        assert torch.equal(whole, before) and torch.equal(own, total[here])
        gathered = torch.full((7 * T,), -1.0)
        # FSDP2 hands over a part of the buffer itself
        start_all_gather_into_(gathered, gathered[here].copy_(own), dist.group.WORLD).wait()
        assert torch.equal(gathered, total)

    run_ranks(work, T)


def test_broadcast_counts_its_source_within_the_group():
    """In the group of world ranks 1 and 2, source 1 is world rank 2."""

    def work(rank, world_size):
        group = dist.new_group([1, 2])
        tensor = torch.full((2,), float(rank))
        return broadcast_(tensor, group, group_source=1).tolist() if rank else None

    assert run_ranks(work, T) == [None, [2.0, 2.0], [2.0, 2.0]]


class _KeepsNothing(KeepsResults):
    """Under it the collectives are functional operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _message(group: ProcessGroup) -> None:
    """Both ranks send to each other, one the hidden states and one the gradient, and wait for
    both."""
    links = Links((group,) * 4, shape=(3,), dtype=torch.float32, device=torch.device("cpu"))
    arriving = links.receive("backward" if group.rank() == 0 else "forward")
    links.send(torch.ones(3), "forward" if group.rank() == 0 else "backward")
    arriving.wait()
    links.wait_sent()


WHOLE, OWN = torch.ones(8), torch.ones(4)  # values of two ranks, and of one
OPERATORS = [
    ("all_reduce", WHOLE),
    ("all_gather_first_dim", OWN),
    ("reduce_scatter_first_dim", WHOLE),
]


def _waits(group: ProcessGroup) -> list[tuple[Callable[[], object], int]]:
    """Each way to wait for another rank, and how many waits it is."""
    return [
        *((lambda n=name, x=x: getattr(collectives, n)(x, group), 1) for name, x in OPERATORS),
        (lambda: all_reduce_(WHOLE, group), 1),
        (lambda: start_all_gather_into_(WHOLE.clone(), OWN, group).wait(), 1),
        (lambda: start_reduce_scatter_into_(OWN.clone(), WHOLE, group).wait(), 1),
        (lambda: broadcast_(WHOLE, group), 1),
        (lambda: collectives.all_gather_bytes(b"text", group), 2),
        (lambda: start_shift(OWN, group).wait(), 1),
        (lambda: _message(group), 2),
    ]


def _clock_that_ticks_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(timing, "time", clock)


def test_each_wait_is_counted_once(monkeypatch):
    """The clock ticks once each time it is read: a wait takes one second of it."""

    def work(rank, world_size):
        _clock_that_ticks_when_read(monkeypatch)
        with timed_waiting():
            for act, waits in _waits(dist.group.WORLD):
                before = WAITING.seconds
                act()
                assert WAITING.seconds - before == waits
            with _KeepsNothing():
                for name, operand in OPERATORS:
                    before = WAITING.seconds
                    getattr(collectives, name)(operand, dist.group.WORLD)
                    assert WAITING.seconds - before == 1, name

    run_ranks(work, 2)
