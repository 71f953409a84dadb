"""A start that its launcher has given up, and that wakes while or after a later start has used the
directory, changes nothing.

It is held at every named point of a save, and, in one process, before every call that the file
system sees. Whatever it is held in, the later start's steps keep their names and bytes, and the
pointer keeps naming the last of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_lite.checkpointing import points, retention
from megatron_lite.checkpointing.points import Point
from megatron_lite.checkpointing.retention import remove_leftovers
from megatron_lite.checkpointing.start import candidates, step_fault
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from tests.support.checkpoints import flip_bit
from tests.support.forks import status_of_fork
from tests.support.pairs import only
from tests.support.ranks import run_ranks
from tests.support.runs import run_to_end
from tests.support.saves import saving_run, train
from tests.support.starts import Saved

JOB = dict(SLURM_JOB_ID="7")


# --- whole runs, held at the named points ---


def first_start(rank: int, world_size: int, config: RunConfig) -> str:
    os.environ.update(JOB, SLURM_RESTART_COUNT="0")
    return train(rank, world_size, config)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory, saved: Saved) -> Callable[[int], Path]:
    """By the number of ranks a directory of three steps, of which only the first is good: a run
    that goes on from it replaces the second, supersedes the third, and deletes the first."""
    made: dict[int, Path] = {}

    def of(ranks: int) -> Path:
        if ranks not in made:
            made[ranks] = tmp_path_factory.mktemp("damaged") / "steps"
            config = saving_run(made[ranks], 3, tp_size=ranks, load=False)
            run_ranks(first_start, ranks, config, detail=False)
            for step in (2, 3):
                file = f"iter_{step:07d}/model_pp00_tp00of{ranks:02d}.safetensors"
                flip_bit(made[ranks] / file, 4001)
        return made[ranks]

    return of


def later_start(config: RunConfig) -> None:
    dist.distributed_c10d.GroupMember.WORLD = None
    os.environ.update(JOB, SLURM_RESTART_COUNT="1")
    run_to_end(config)


def check_run(folder: Path, damaged: Path, ranks: int, point: Point, async_save: bool) -> None:
    """Start 0 is held while it saves step 2. Start 1, a process of its own on one rank, goes on to
    step 4. Then start 0 wakes."""
    shutil.copytree(damaged, folder)
    newer = saving_run(folder, 4)
    newer = replace(newer, training=replace(newer.training, seed=9))

    def stale(rank: int, world_size: int) -> str:
        def reached(at: Point) -> None:
            if at is not point or rank != 0:
                return
            points.reached = lambda at: None
            assert status_of_fork(lambda: later_start(newer)) == 0

        points.reached = reached
        options = dict(async_save=async_save, save_keep_last=1)
        return first_start(rank, world_size, saving_run(folder, 2, tp_size=ranks, **options))

    messages = run_ranks(stale, ranks, detail=False)
    if point not in (Point.DELETED, Point.DONE):  # then nothing of its save was left to do
        assert all("was given up for lost" in message for message in messages), messages
    assert (folder / LATEST).read_text() == "4"
    for step in (3, 4):
        path = folder / f"iter_{step:07d}"
        assert json.loads((path / "config.json").read_text())["training"]["seed"] == 9
        assert step_fault(path) is None
    there = candidates(folder)
    assert (there.fault, there.stale, there.steps[0]) == (None, None, 4)
    assert not list(folder.glob("*.tmp*"))


@pytest.mark.parametrize(
    "point", only(Point, *(list(Point).index(one) for one in (Point.RENAMED, Point.POINTED)))
)
def test_a_stale_start_publishes_nothing_over_the_newer_one(
    tmp_path: Path, damaged: Callable[[int], Path], point: Point
) -> None:
    """Between two ranks in the training's own thread, on one in a background thread, by turns."""
    two = list(Point).index(point) % 2 == 0
    check_run(tmp_path / "steps", damaged(1 + two), 1 + two, point, async_save=not two)


# --- a writer alone, held before every call that the file system sees ---


RENAMES = ("replace", "rename")
CALLS = (*RENAMES, "fsync", "mkdir", "unlink", "rmdir", "link")
REAL = {name: getattr(os, name) for name in CALLS}
REAL["fsync"] = lambda descriptor: None  # it takes most of the test's time


Hold = Callable[[pytest.MonkeyPatch, Callable[[], None]], None]


def before_call(calls: tuple[str, ...], number: int) -> Hold:
    """Holds a start before one of these calls; the first one is counted once the directory is
    taken."""

    def hold(patch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
        count = -1

        def wrapped(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                nonlocal count
                if count >= 0:
                    count += 1
                    if count - 1 == number:
                        meanwhile()
                return real(*args, **kwargs)

            return call

        def counting(*args: object, **kwargs: object) -> object:
            nonlocal count
            count = max(count, 0)
            return remove_leftovers(*args, **kwargs)  # type: ignore[arg-type]

        for name in calls:
            patch.setattr(os, name, wrapped(REAL[name]))
        patch.setattr(retention, "remove_leftovers", counting)

    return hold


def at_point(point: Point) -> Hold:
    """Holds a start at the named point."""

    def hold(patch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
        def reached(at: Point) -> None:
            if at is point:
                patch.setattr(points, "reached", lambda at: None)
                meanwhile()

        patch.setattr(points, "reached", reached)

    return hold


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory, saved: Saved) -> Path:
    """A directory in which steps 1 and 2 are good, 4 is damaged, and 3 is later than where a run
    goes on from."""
    root = tmp_path_factory.mktemp("beginning")
    saved.start(root, 0, [1, 2, 3, 4])
    flip_bit(root / "iter_0000004" / "model_pp00_tp00of01.safetensors", 4001)
    (root / LATEST).write_text("2")
    return root


def contents(root: Path) -> dict[str, bytes]:
    """All files that a reader looks at."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
        and (path.name == LATEST or (path.parent != root and path.parent.suffix == ""))
    }


def check_held(root: Path, saved: Saved, hold: Hold, later: list[int]) -> bool:
    """Holds a start, while a later one saves these iterations. Whether the start came to where it
    is held."""
    at_the_end: dict[str, bytes] = {}

    def take_over() -> None:
        with pytest.MonkeyPatch.context() as inner:  # the later start is not held
            for name in CALLS:
                inner.setattr(os, name, REAL[name])
            inner.setattr(retention, "remove_leftovers", remove_leftovers)
            saved.start(root, 2, later)
            at_the_end.update(contents(root))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", REAL["fsync"])
        hold(patch, take_over)
        try:
            saved.start(root, 1, [4], save_keep_last=1)
        except InputError as error:
            assert "given up for lost" in str(error), error
        if not at_the_end:
            return False
    assert contents(root) == at_the_end
    assert (root / LATEST).read_text() == str(later[-1])
    there = candidates(root)
    assert (there.fault, there.stale, there.steps[0]) == (None, None, later[-1])
    assert saved.start(root, 3, []).iteration == later[-1]
    assert contents(root) == at_the_end
    return True


def check_all(
    folder: Path, beginning: Path, saved: Saved, calls: tuple[str, ...], later: list[int]
) -> int:
    """Holds a start before each of these calls by turns; how many there are."""
    number = 0
    while check_held(
        shutil.copytree(beginning, folder / str(number)), saved, before_call(calls, number), later
    ):
        number += 1
    return number


def test_held_before_any_change_of_a_name_a_stale_start_changes_nothing(
    tmp_path: Path, beginning: Path, saved: Saved
) -> None:
    """A step moves aside and is deleted, one is published, the pointer moves, one is superseded,
    three are deleted."""
    assert check_all(tmp_path, beginning, saved, RENAMES, [3, 6]) == 8


# no model is copied here
@pytest.mark.parametrize("point", [point for point in Point if point is not Point.SNAPSHOT])
def test_held_at_a_named_point_a_stale_start_changes_nothing(
    tmp_path: Path, beginning: Path, saved: Saved, point: Point
) -> None:
    assert check_held(
        shutil.copytree(beginning, tmp_path / "steps"), saved, at_point(point), [3, 6]
    )


@pytest.mark.long
@pytest.mark.parametrize("later", [[5, 6], [3, 4, 6], [4]], ids=str)
def test_held_before_any_call_a_stale_start_changes_nothing(
    tmp_path: Path, beginning: Path, saved: Saved, later: list[int]
) -> None:
    assert check_all(tmp_path, beginning, saved, CALLS, later) > 30
