"""The stopwatch of --log-straggler counts every wait for another rank once, of the thread that
asks, and of no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lite.parallel import collectives, ring, waiting
from megatron_lite.parallel.collectives import KeepsResults
from megatron_lite.parallel.waiting import WAITING, timed_waiting
from megatron_lite.pipeline.links import Links
from tests.support.ranks import run_ranks

Wait = Callable[[ProcessGroup], object]
WHOLE, OWN = 8, 4  # values of two ranks, and of one


class _KeepsNothing(KeepsResults):
    """Under it the collectives are functional operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _kept(act: Callable[[], object]) -> None:
    with _KeepsNothing():
        act()


def _message(group: ProcessGroup) -> None:
    """Both ranks send to each other, one the hidden states and one the gradient, and wait for
    both."""
    links = Links((group,) * 4, shape=(3,), dtype=torch.float32, device=torch.device("cpu"))
    arriving = links.receive("backward" if group.rank() == 0 else "forward")
    links.send(torch.ones(3), "forward" if group.rank() == 0 else "backward")
    arriving.wait()
    links.wait_sent()


# Each by name, and how many waits it is.
WAITS: dict[str, tuple[Wait, int]] = {
    "all_reduce_": (lambda group: collectives.all_reduce_(torch.ones(WHOLE), group), 1),
    "all_reduce": (lambda group: collectives.all_reduce(torch.ones(WHOLE), group), 1),
    "all_reduce, kept": (
        lambda group: _kept(lambda: collectives.all_reduce(torch.ones(WHOLE), group)),
        1,
    ),
    "start_all_reduce_": (
        lambda group: collectives.start_all_reduce_(torch.ones(WHOLE), group).wait(),
        1,
    ),
    "all_gather_first_dim": (
        lambda group: collectives.all_gather_first_dim(torch.ones(OWN), group),
        1,
    ),
    "all_gather_first_dim, kept": (
        lambda group: _kept(lambda: collectives.all_gather_first_dim(torch.ones(OWN), group)),
        1,
    ),
    "reduce_scatter_first_dim": (
        lambda group: collectives.reduce_scatter_first_dim(torch.ones(WHOLE), group),
        1,
    ),
    "reduce_scatter_first_dim, kept": (
        lambda group: _kept(lambda: collectives.reduce_scatter_first_dim(torch.ones(WHOLE), group)),
        1,
    ),
    "all_gather_into_": (
        lambda group: collectives.all_gather_into_(torch.ones(WHOLE), torch.ones(OWN), group),
        1,
    ),
    "reduce_scatter_into_": (
        lambda group: collectives.reduce_scatter_into_(torch.ones(OWN), torch.ones(WHOLE), group),
        1,
    ),
    "broadcast_": (lambda group: collectives.broadcast_(torch.ones(WHOLE), group), 1),
    "all_gather_bytes": (lambda group: collectives.all_gather_bytes(b"text", group), 2),
    "start_shift": (lambda group: ring.start_shift(torch.ones(OWN), group).wait(), 1),
    "links": (_message, 2),
}


def count_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Makes the stopwatch's clock tick once each time it is read. Returns its ticks."""
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(waiting, "time", clock)
    return ticks


def _counted(rank: int, world_size: int) -> dict[str, float]:
    group = dist.group.WORLD
    assert group is not None
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch, timed_waiting():
        count_looks_at_the_clock(monkeypatch)
        for name, (act, _) in WAITS.items():
            before = WAITING.seconds
            act(group)
            found[name] = WAITING.seconds - before
    return found


def test_each_wait_is_counted_once() -> None:
    """The clock ticks once each time it is read: a wait takes one second of it."""
    expected = {name: float(waits) for name, (_, waits) in WAITS.items()}
    assert run_ranks(_counted, 2) == [expected] * 2


def test_a_thread_counts_its_own_waits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def other() -> None:
        with WAITING:
            seen.append((WAITING.is_timed, WAITING.seconds))

    looks = count_looks_at_the_clock(monkeypatch)
    with timed_waiting():
        before = WAITING.seconds
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert WAITING.seconds == before and seen == [(False, 0.0)]
    assert next(looks) == 0
