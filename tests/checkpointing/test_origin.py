"""Readers follow the course of the highest start, and a pointer that was written before it is not
followed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from megatron_lite.checkpointing.directory import SaveDirectory
from megatron_lite.checkpointing.lock import LOCK, DirectoryLock, Holder, LockLost
from megatron_lite.checkpointing.manifest import MANIFEST
from megatron_lite.checkpointing.start import candidates
from megatron_lite.checkpointing.step_files import LATEST
from tests.support.checkpoints import flip_bit
from tests.support.starts import Began, Saved


@pytest.fixture(scope="module")
def two_starts(tmp_path_factory: pytest.TempPathFactory, saved: Saved) -> Path:
    """Start 1 saved 2, 4, 6 (6 is damaged); start 2 went on from 4 and saved 5, 8. In 6.superseded
    is what start 1 left."""
    root = tmp_path_factory.mktemp("two")
    saved.start(root, 0, [2, 4, 6])
    flip_bit(root / "iter_0000006" / "model_pp00_tp00of01.safetensors", 4001)
    assert saved.start(root, 1, [5, 8]) == Began(4, 2)
    return root


@pytest.fixture
def root(tmp_path: Path, two_starts: Path) -> Path:
    return shutil.copytree(two_starts, tmp_path / "steps")


def holder(job: str) -> Holder:
    return Holder(job=job, run="r", requeues=0, restarts=9, host="a", pid=1, token=f"token {job}")


def written_before(path: Path, other: Path) -> None:
    """Makes the one older than the other."""
    os.utime(path, ns=(0, other.stat().st_mtime_ns - 1))


def test_the_number_grows_although_the_lock_was_removed(root: Path, saved: Saved) -> None:
    (root / LOCK).unlink()
    assert saved.start(root, 0, []).start == 3


def test_a_pointer_of_a_start_before_the_last_one_is_not_followed(root: Path, saved: Saved) -> None:
    """As a stale start would leave it on a file system where it gets through."""
    (root / LATEST).write_text("4")
    written_before(root / LATEST, root / "iter_0000008" / MANIFEST)
    there = candidates(root)
    assert there.steps == [8, 5, 4, 2] and there.fault is None
    assert "a later start has saved iter_0000008 since" in str(there.stale)
    assert saved.start(root, 2, []).iteration == 8


def test_a_pointer_that_a_person_has_set_is_followed(root: Path) -> None:
    (root / LATEST).write_text("4")
    there = candidates(root)
    assert (there.fault, there.stale, there.steps, there.later) == (None, None, [4, 2], [5, 8])


def test_a_step_of_a_course_that_was_left_is_set_aside_by_the_next_save(
    root: Path, saved: Saved
) -> None:
    """Whether the pointer is whole or not."""
    shutil.copytree(root / "iter_0000006.superseded", root / "iter_0000006")
    assert (candidates(root).steps, candidates(root).left) == ([8, 5, 4, 2], [6])
    (root / LATEST).write_text("")
    assert candidates(root).steps == [8, 5, 4, 2, 6]  # rather than none
    (root / LATEST).write_text("8")
    saved.start(root, 2, [9])
    assert not (root / "iter_0000006").exists() and (root / "iter_0000006.superseded2").exists()


def test_no_start_touches_a_step_of_a_later_one(root: Path, saved: Saved) -> None:
    """Even if it holds the lock, as where that was removed by hand and the number with it."""
    path = root / "iter_0000004" / MANIFEST
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "start": 99}))
    (root / LATEST).write_text("2")
    lock = DirectoryLock(root, holder("7"))
    with pytest.raises(LockLost, match=r"was saved by a later start \(number 99, this one has 3\)"):
        SaveDirectory(root, lock).supersede(root / "iter_0000004")
    assert (root / "iter_0000004").exists()
    lock.release()


def test_a_later_start_takes_away_what_an_earlier_one_could_still_publish(
    root: Path, saved: Saved
) -> None:
    for name in ("iter_0000009.tmp-x", f"{LATEST}.tmp-x"):
        path = root / name
        path.write_text("") if LATEST in name else shutil.copytree(root / "iter_0000008", path)
    saved.start(root, 2, [])
    assert not [path for path in root.iterdir() if ".tmp" in path.name]


@pytest.mark.parametrize("whole", [True, False])
def test_a_step_that_was_about_to_be_deleted_comes_back_if_it_is_whole(
    root: Path, saved: Saved, whole: bool
) -> None:
    (root / "iter_0000005").rename(root / "iter_0000005.deleted-x")
    if not whole:
        (root / "iter_0000005.deleted-x" / MANIFEST).unlink()
    saved.start(root, 2, [])
    assert (root / "iter_0000005").exists() is whole and not list(root.glob("*.deleted*"))


def test_a_lock_that_comes_back_leaves_another_ones_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removed by hand, and taken by another run between a look and the return."""
    lock = DirectoryLock(root, holder("1"))
    (root / LOCK).unlink()
    sign = lock._sign
    other: list[DirectoryLock] = []

    def signing(descriptor: int) -> None:
        sign(descriptor)
        monkeypatch.undo()
        other.append(DirectoryLock(root, holder("2")))

    monkeypatch.setattr(lock, "_sign", signing)
    with pytest.raises(LockLost, match="is now held by job 2"):
        lock.check()
    other[0].check()
    for one in (lock, *other):
        one.release()


def test_a_whole_step_that_was_moved_aside_takes_the_place_of_a_damaged_one(
    root: Path, saved: Saved
) -> None:
    shutil.copytree(root / "iter_0000008", root / "iter_0000008.old")
    (root / "iter_0000008" / "rng_00000.safetensors").write_bytes(b"")
    assert saved.start(root, 2, []).iteration == 8
    assert not (root / "iter_0000008.old").exists()
