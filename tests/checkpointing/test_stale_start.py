"""A start that its launcher has given up, and that wakes while or after a later start has used the
directory, changes nothing.

It is held before every call that the file system sees. Whatever it is held in, the later start's
steps keep their names and bytes, and the pointer keeps naming the last of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpointing.directory import SaveDirectory
from megatron_lite.checkpointing.start import candidates
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from tests.support.checkpoints import flip_bit
from tests.support.starts import Saved

RENAMES = ("replace", "rename")
CALLS = (*RENAMES, "fsync", "mkdir", "unlink", "rmdir", "link")
REAL = {name: getattr(os, name) for name in CALLS}
REAL["fsync"] = lambda descriptor: None  # it takes most of the test's time


def held_before(
    patch: pytest.MonkeyPatch,
    calls: tuple[str, ...],
    number: int,
    began: tuple[type, str],
    meanwhile: Callable[[], None],
) -> None:
    """Calls `meanwhile` before that call of these functions, counted from 0 once `began` is called.

    began: a class and the name of its method.
    """
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

    real_began = getattr(*began)

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal count
        count = max(count, 0)
        return real_began(*args, **kwargs)

    for name in calls:
        patch.setattr(os, name, wrapped(REAL[name]))
    patch.setattr(*began, counting)


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


def check_held(
    root: Path, saved: Saved, calls: tuple[str, ...], number: int, later: list[int]
) -> bool:
    """Holds a start before a call, while a later one saves these iterations. Returns whether the
    start came to that call."""
    at_the_end: dict[str, bytes] = {}
    begun: tuple[Any, str] = (SaveDirectory, "remove_leftovers")
    remove_leftovers = SaveDirectory.remove_leftovers

    def take_over() -> None:
        with pytest.MonkeyPatch.context() as inner:  # the later start is not held
            for name in CALLS:
                inner.setattr(os, name, REAL[name])
            inner.setattr(*begun, remove_leftovers)
            saved.start(root, 2, later)
            at_the_end.update(contents(root))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", REAL["fsync"])
        held_before(patch, calls, number, begun, take_over)
        try:
            saved.start(root, 1, [4], save_keep_last=1)
        except InputError as error:
            assert "given up for lost" in str(error), error
        if not at_the_end:
            return False
    assert contents(root) == at_the_end
    assert (root / LATEST).read_text() == str(later[-1])
    assert candidates(root).fault is None
    assert saved.start(root, 3, []) == later[-1]
    assert contents(root) == at_the_end
    return True


def check_all(
    folder: Path, beginning: Path, saved: Saved, calls: tuple[str, ...], later: list[int]
) -> int:
    """Holds a start before each of these calls by turns; how many there are."""
    number = 0
    while check_held(shutil.copytree(beginning, folder / str(number)), saved, calls, number, later):
        number += 1
    return number


def test_held_before_any_change_of_a_name_a_stale_start_changes_nothing(
    tmp_path: Path, beginning: Path, saved: Saved
) -> None:
    """A folder is made, two steps are set aside, one is published, the pointer moves,
    and four are deleted."""
    assert check_all(tmp_path, beginning, saved, ("mkdir", *RENAMES), [3, 6]) == 10


@pytest.mark.runs(daily=0, ci=1)
@pytest.mark.parametrize("later", [[5, 6], [3, 4, 6], [4]], ids=str)
def test_held_before_any_call_a_stale_start_changes_nothing(
    tmp_path: Path, beginning: Path, saved: Saved, later: list[int]
) -> None:
    assert check_all(tmp_path, beginning, saved, CALLS, later) > 30


def test_a_later_start_takes_away_what_an_earlier_one_could_still_publish(
    tmp_path: Path, saved: Saved
) -> None:
    """And it gives a step its name back that an older version had moved aside."""
    saved.start(tmp_path, 0, [1, 2])
    for name in ("iter_0000009.tmp-x", "iter_0000007.deleted-x"):
        shutil.copytree(tmp_path / "iter_0000002", tmp_path / name)
    (tmp_path / f"{LATEST}.tmp-x").write_text("")
    (tmp_path / "iter_0000002").rename(tmp_path / "iter_0000002.old")
    assert saved.start(tmp_path, 1, []) == 2
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"iter_0000001", "iter_0000002", LATEST, "lock.json"}
