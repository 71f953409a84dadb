"""A rank that is killed while a checkpoint is written ends the others soon, in either way of
saving."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_lite.checkpointing import points
from megatron_lite.checkpointing.points import Point
from megatron_lite.checkpointing.start import candidates, newest_good_step, step_fault
from tests.support.forks import leave
from tests.support.limits import HANG_S
from tests.support.runs import run_to_end, tiny_run


def survivors(fn: Callable[[int], None], world_size: int, rendezvous: Path) -> list[str | None]:
    """What each rank raised; None for one that died."""
    context = multiprocessing.get_context("fork")

    def child(rank: int, writer: Connection) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=2 * HANG_S),
        )
        try:
            fn(rank)
            writer.send("")
        except Exception as error:
            writer.send(f"{type(error).__name__}: {error}")
        writer.close()
        leave(0)  # the group cannot be left in order

    pipes, processes = [], []
    for rank in range(world_size):
        reader, writer = context.Pipe(duplex=False)
        processes.append(context.Process(target=child, args=(rank, writer)))
        processes[-1].start()
        writer.close()
        pipes.append(reader)
    results: list[str | None] = []
    for pipe, process in zip(pipes, processes, strict=True):
        try:
            results.append(pipe.recv() if pipe.poll(HANG_S) else "still waiting")
        except EOFError:
            results.append(None)
        process.kill()
        process.join()
    return results


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What a run imports late need not be imported again by each fork."""
    run_to_end(tiny_run(training=dict(train_iters=1, eval_iters=0)))


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("victim", "point"), [(1, Point.MODEL), (1, Point.LISTED), (0, Point.MANIFEST)]
)
def test_the_others_raise_at_once(
    tmp_path: Path, victim: int, point: Point, async_save: bool
) -> None:
    def train(rank: int) -> None:
        def reached(at: Point) -> None:
            if at is point and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)

        points.reached = reached
        run_to_end(
            tiny_run(
                tp_size=2,
                training=dict(train_iters=400, eval_iters=0),
                checkpoint=dict(
                    save=str(tmp_path / "save"), save_interval=2, async_save=async_save
                ),
            )
        )

    found = survivors(train, 2, tmp_path / "rendezvous")
    assert found[victim] is None
    assert "closed by peer" in str(found[1 - victim]) or "reset by peer" in str(found[1 - victim])
    there = candidates(tmp_path / "save")
    if there.steps:
        newest_good_step(tmp_path / "save", there, step_fault, fallback=False)
