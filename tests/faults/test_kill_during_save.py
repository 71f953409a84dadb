"""SIGKILL at every named point of a save: the last durable checkpoint loads, and the run ends as if
nothing had happened.

Each run starts from a directory whose two newest steps are damaged, so that its first save reaches
every point: it replaces one, supersedes the other, and deletes the old good one once the new one is
durable.
"""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_lite.checkpointing import points
from megatron_lite.checkpointing.points import Point
from megatron_lite.checkpointing.start import candidates, newest_good_step, step_fault
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.collectives import all_gather_bytes
from tests.support.checkpoints import flip_bit
from tests.support.ranks import RankFailure, run_ranks
from tests.support.runs import run_to_end, step_bytes, tiny_run
from tests.support.saves import saving_run, train

ON_EVERY_RANK = {
    Point.SNAPSHOT,
    Point.MODEL,
    Point.OPTIMIZER,
    Point.RNG,
    Point.TEXTS,
    Point.LISTED,
    Point.DONE,
}
LAST = 4
run_of = partial(saving_run, last=LAST, tp_size=2)


def train_until_killed(
    rank: int, world_size: int, config: RunConfig, point: Point, takes_all: bool
) -> None:
    """The rank that reaches the point is killed (rank 1 where all do); takes_all: after it has
    killed the others."""
    pids = [int(pid) for pid in all_gather_bytes(str(os.getpid()).encode(), dist.group.WORLD)]

    def reached(at: Point) -> None:
        if at is point and (rank == 1 or point not in ON_EVERY_RANK):
            for pid in sorted(pids, key=os.getpid().__eq__) if takes_all else [os.getpid()]:
                os.kill(pid, signal.SIGKILL)

    points.reached = reached
    run_to_end(config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The final files of an uninterrupted run."""
    # what it imports need not be imported again by each fork
    run_to_end(tiny_run(training=dict(train_iters=1, eval_iters=0)))
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(train, 2, run_of(folder, load=False), detail=False)
    return step_bytes(folder, LAST)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of three steps, of which only the first is good."""
    folder = tmp_path_factory.mktemp("damaged") / "steps"
    run_ranks(train, 2, run_of(folder, stop=3, load=False), detail=False)
    for step in (2, 3):
        flip_bit(folder / f"iter_{step:07d}" / "model_pp00_tp01of02.safetensors", 4001)
    return folder


# A default run has every third point, in one of two ways; .ci/run kills one rank and all of them,
# in both ways of saving.
CASES = [
    pytest.param(point, takes_all, async_save, marks=[pytest.mark.long] * (not by_default))
    for number, point in enumerate(Point)
    for takes_all in (False, True)
    for async_save in (False, True)
    if takes_all == async_save or number % 4 < 2
    for by_default in [number % 6 == 3 * takes_all and takes_all == async_save]
]


@pytest.mark.parametrize(("point", "takes_all", "async_save"), CASES)
def test_a_kill_at_any_point_costs_nothing(
    tmp_path: Path,
    damaged: Path,
    whole: dict[str, bytes],
    point: Point,
    takes_all: bool,
    async_save: bool,
) -> None:
    folder = shutil.copytree(damaged, tmp_path / "steps")
    config = run_of(folder, save_keep_last=1, async_save=async_save)
    with pytest.raises(RankFailure, match="exit code -9|Connection (closed|reset) by peer"):
        run_ranks(train_until_killed, 2, config, point, takes_all, detail=False)
    order = list(Point)
    is_durable = order.index(point) >= order.index(Point.RENAMED)
    found = newest_good_step(folder, candidates(folder), step_fault, fallback=True)
    if point is not Point.LISTED or takes_all:  # there rank 0 has all that it needs to go on
        assert found.step.name == ("iter_0000002" if is_durable else "iter_0000001")
    run_ranks(train, 2, config, detail=False)
    assert step_bytes(folder, LAST) == whole
    assert {path.suffix for path in folder.glob("iter_*")} <= {"", ".superseded"}
