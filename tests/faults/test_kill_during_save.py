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
from pathlib import Path
from typing import Any

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


def config_of(
    folder: Path, *, last: int = LAST, load: bool = True, **checkpoint: object
) -> RunConfig:
    where = dict(save=str(folder), save_interval=1, **({"load": str(folder)} if load else {}))
    return tiny_run(
        tp_size=2,
        training=dict(
            train_iters=LAST,
            global_batch_size=1,
            eval_iters=0,
            **({} if last == LAST else {"exit_interval": last}),
        ),
        checkpoint=dict(**where, **checkpoint),
    )


def train(rank: int, world_size: int, config: RunConfig) -> None:
    run_to_end(config)


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
    run_ranks(train, 2, config_of(folder, load=False), detail=False)
    return step_bytes(folder, LAST)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of three steps, of which only the first is good."""
    folder = tmp_path_factory.mktemp("damaged") / "steps"
    run_ranks(train, 2, config_of(folder, last=3, load=False), detail=False)
    for step in (2, 3):
        flip_bit(folder / f"iter_{step:07d}" / "model_pp00_tp01of02.safetensors", 4001)
    return folder


def check(
    folder: Path,
    damaged: Path,
    whole: dict[str, bytes],
    point: Point,
    *,
    takes_all: bool,
    async_save: bool,
) -> None:
    shutil.copytree(damaged, folder)
    config = config_of(folder, save_keep_last=1, async_save=async_save)
    with pytest.raises(RankFailure, match="exit code -9|Connection (closed|reset) by peer"):
        run_ranks(train_until_killed, 2, config, point, takes_all, detail=False)
    order = list(Point)
    is_durable = order.index(point) >= order.index(Point.RENAMED)
    found = newest_good_step(folder, candidates(folder), step_fault, fallback=True)
    if point is not Point.LISTED or takes_all:  # there rank 0 has all that it needs to go on
        assert found.step.name == ("iter_0000002" if is_durable else "iter_0000001")
    run_ranks(train, 2, config, detail=False)
    assert step_bytes(folder, LAST) == whole
    assert not [
        path.name
        for path in folder.iterdir()
        if ".tmp" in path.name or ".deleted" in path.name or ".old" in path.name
    ]


def every_sixth(first: int) -> list[Any]:
    """All points, of which five in six are left to .ci/run."""
    return [
        pytest.param(point, marks=[pytest.mark.long] * (number % 6 != first))
        for number, point in enumerate(Point)
    ]


# Together these two kill one rank and all of them, in both ways of saving, at every point; a
# default run has every third point, in one of the two.
@pytest.mark.parametrize("point", every_sixth(0))
def test_one_rank_is_killed_while_it_saves(
    tmp_path: Path, damaged: Path, whole: dict[str, bytes], point: Point
) -> None:
    check(tmp_path / "steps", damaged, whole, point, takes_all=False, async_save=False)


@pytest.mark.parametrize("point", every_sixth(3))
def test_all_ranks_are_killed_while_a_thread_saves(
    tmp_path: Path, damaged: Path, whole: dict[str, bytes], point: Point
) -> None:
    check(tmp_path / "steps", damaged, whole, point, takes_all=True, async_save=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("point", "takes_all"),
    [(point, number % 2 == 0) for number, point in enumerate(Point) if number % 4 < 2],
)
def test_the_other_way_round(
    tmp_path: Path, damaged: Path, whole: dict[str, bytes], point: Point, takes_all: bool
) -> None:
    check(tmp_path / "steps", damaged, whole, point, takes_all=takes_all, async_save=not takes_all)
