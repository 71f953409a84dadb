"""Readers follow the highest start, also where a start that was given up for lost has written a
pointer or a step in spite of the lock."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from megatron_lite.checkpointing import start
from megatron_lite.checkpointing.directory import SaveDirectory
from megatron_lite.checkpointing.lock import LOCK, DirectoryLock, Holder, LockLost
from megatron_lite.checkpointing.metadata import MANIFEST
from megatron_lite.checkpointing.start import candidates, newest_good_step, step_fault
from megatron_lite.checkpointing.step_files import LATEST
from tests.support.checkpoints import flip_bit
from tests.support.starts import Saved


@pytest.fixture(scope="module")
def two_starts(tmp_path_factory: pytest.TempPathFactory, saved: Saved) -> Path:
    """Start 1 saved 2, 4 and 6; 6 is damaged. Start 2 went on from 4, and saved 5 and 8."""
    root = tmp_path_factory.mktemp("two")
    saved.start(root, 0, [2, 4, 6])
    flip_bit(root / "iter_0000006" / "model_pp00_tp00of01.safetensors", 4001)
    assert saved.start(root, 1, [5, 8]) == 4
    return root


@pytest.fixture
def root(tmp_path: Path, two_starts: Path) -> Path:
    return shutil.copytree(two_starts, tmp_path / "steps")


def rewrite(step: Path, drop: tuple[str, ...] = (), **values: object) -> None:
    """Changes fields of a manifest, and not its time."""
    path = step / MANIFEST
    time = path.stat().st_mtime_ns
    old = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**old, **values}.items() if k not in drop}))
    os.utime(path, ns=(time, time))


def start_of(root: Path, step: int) -> int:
    return json.loads((root / f"iter_{step:07d}" / MANIFEST).read_text())["start"]


@pytest.mark.parametrize("number", [None, 1, 2**31])
def test_the_number_grows_although_the_lock_was_removed(
    root: Path, saved: Saved, number: int | None
) -> None:
    """It ends at the largest one that a manifest may have."""
    assert [start_of(root, step) for step in (2, 4, 5, 8)] == [1, 1, 2, 2]
    if number is None:
        saved.start(root, 2, [])  # start 3 saves nothing
    else:
        (root / LOCK).unlink()
        rewrite(root / "iter_0000008", start=number)
    assert saved.start(root, 3, [9]) == 8
    assert start_of(root, 9) == {None: 4, 1: 3, 2**31: 2**31}[number]
    assert step_fault(root / "iter_0000009") is None


def test_a_pointer_of_an_earlier_start_is_followed_only_if_it_was_set_since(
    root: Path, saved: Saved
) -> None:
    """As a stale start would leave it on a file system where it gets through."""
    (root / LATEST).write_text("4")
    assert candidates(root).steps == [4, 2]
    time = (root / "iter_0000008" / MANIFEST).stat().st_mtime_ns - 1
    os.utime(root / LATEST, ns=(time, time))
    there = candidates(root)
    assert there.fault is None and there.steps == [8, 5, 4, 2]
    notices = newest_good_step(root, there, step_fault, fallback=False).notices
    assert "not followed" in notices[0] and "iter_0000008" in notices[0]
    assert saved.start(root, 2, []) == 8


@pytest.mark.parametrize(("step", "gone"), [(6, ()), (6, (5,)), (9, ())])
def test_a_step_of_an_earlier_start_is_reported_and_not_used(
    root: Path, saved: Saved, step: int, gone: tuple[int, ...]
) -> None:
    """Whether the pointer is whole or not, and although the newest step is damaged."""
    stale = root / f"iter_{step:07d}"
    shutil.copytree(root / "iter_0000004", stale)
    rewrite(stale, iteration=step)
    for other in gone:
        shutil.rmtree(root / f"iter_{other:07d}")
    flip_bit(root / "iter_0000008" / "model_pp00_tp00of01.safetensors", 4001)
    course = [other for other in (8, 5, 4, 2) if other not in gone]
    there = candidates(root)
    assert there.steps == course
    assert f"not used: {stale.name}" in there.notices[0]
    (root / LATEST).write_text("")
    assert candidates(root).steps == [*course, step]  # rather than none
    assert saved.start(root, 2, []) == course[1]


def test_no_start_touches_a_step_of_a_later_one(root: Path) -> None:
    """Even if it holds the lock, as where that was removed by hand and taken again."""
    lock = DirectoryLock(
        root, Holder(job="7", run="r", requeues=0, restarts=9, host="a", pid=1, token="t")
    )
    rewrite(root / "iter_0000004", start=lock.holder.start + 1)
    (root / LOCK).unlink()
    with pytest.raises(LockLost, match="iter_0000004 was saved by a later start"):
        SaveDirectory(root, lock).publish(root / "no step", 4, leads_here=bool)
    assert (root / "iter_0000004").exists()
    SaveDirectory(root, lock)._delete(root / "iter_0000005")
    assert not (root / "iter_0000005").exists()
    lock.release()


@pytest.mark.parametrize(
    "numbered", [(), (2, 4), (5, 8), pytest.param((2, 4, 5, 8), id="those of an older version")]
)
def test_steps_without_numbers_are_used_as_before(
    root: Path, saved: Saved, numbered: tuple[int, ...]
) -> None:
    """And those of the version that listed the course of each step."""
    for step in (2, 4, 5, 8):
        drop = ("started_at",) if step in numbered else ("started_at", "start")
        rewrite(root / f"iter_{step:07d}", drop, course=[[1, 4]])
    values = json.loads((root / LOCK).read_text())
    (root / LOCK).write_text(json.dumps({k: v for k, v in values.items() if k != "start"}))
    assert Holder.read(root / LOCK) is not None
    assert candidates(root) == (None, [8, 5, 4, 2], [])
    assert saved.start(root, 2, [10]) == 8
    assert candidates(root) == (None, [10, 8, 5, 4, 2], [])


def test_a_step_that_goes_between_the_pointer_and_the_list_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved_steps(root: Path) -> list[int]:
        shutil.rmtree(root / "iter_0000008")
        return [2, 4, 5, 6]

    monkeypatch.setattr(start, "saved_steps", saved_steps)
    found = candidates(root)
    assert found.steps[0] == 5 and "names iteration 8, which is gone" in (found.fault or "")
