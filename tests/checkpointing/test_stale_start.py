"""A start that its launcher has given up, and that wakes while or after a later start has used the
directory, changes nothing.

It is held before every call that the file system sees. Whatever it is held in, the later start's
steps keep their names and bytes, and the pointer keeps naming the last of them.

Readers follow the highest start, also where a start that was given up for lost has written a
pointer or a step in spite of the lock.
"""

import json
import os
import shutil

import pytest

from megatron_lite.checkpointing import start
from megatron_lite.checkpointing.directory import SaveDirectory
from megatron_lite.checkpointing.lock import LOCK, Holder, LockLost
from megatron_lite.checkpointing.metadata import MANIFEST
from megatron_lite.checkpointing.start import candidates, newest_good_step, step_fault
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from tests.support.checkpoints import flip_bit

RENAMES = ("replace", "rename")
OF_NAMES = ("mkdir", *RENAMES)
CALLS = (*OF_NAMES, "fsync", "unlink", "rmdir", "link")
REAL = {name: getattr(os, name) for name in CALLS}
REAL["fsync"] = lambda descriptor: None  # it takes most of the test's time


def held_before(patch, calls, number, began, meanwhile):
    """Calls `meanwhile` before that call of these functions, counted from 0 once `began` is called.

    began: a class and the name of its method.
    """
    count = -1

    def wrapped(real):
        def call(*args, **kwargs):
            nonlocal count
            if count >= 0:
                count += 1
                if count - 1 == number:
                    meanwhile()
            return real(*args, **kwargs)

        return call

    real_began = getattr(*began)

    def counting(*args, **kwargs):
        nonlocal count
        count = max(count, 0)
        return real_began(*args, **kwargs)

    for name in calls:
        patch.setattr(os, name, wrapped(REAL[name]))
    patch.setattr(*began, counting)


@pytest.fixture(scope="module")
def beginning(tmp_path_factory, saved):
    """A directory in which steps 1 and 2 are good, 4 is damaged, and 3 is later than where a run
    goes on from."""
    root = tmp_path_factory.mktemp("beginning")
    saved.start(root, 0, [1, 2, 3, 4])
    flip_bit(root / "iter_0000004" / "model_pp00_tp00of01.safetensors", 4001)
    (root / LATEST).write_text("2")
    return root


def contents(root):
    """All files that a reader looks at."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
        and (path.name == LATEST or (path.parent != root and path.parent.suffix == ""))
    }


def check_held(root, saved, calls, number, later):
    """Holds a start before a call, while a later one saves these iterations. Returns whether the
    start came to that call."""
    at_the_end = {}
    begun = (SaveDirectory, "remove_leftovers")
    remove_leftovers = SaveDirectory.remove_leftovers

    def take_over():
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


@pytest.mark.runs
@pytest.mark.parametrize(
    "calls, later", [(OF_NAMES, [3, 6]), (CALLS, [3, 4, 6]), (CALLS, [5, 6]), (CALLS, [4])], ids=str
)
def test_held_before_any_call_a_stale_start_changes_nothing(
    tmp_path, beginning, saved, calls, later
):
    """A folder is made, two steps are set aside, one is published, the pointer moves,
    and four are deleted."""
    number = 0
    while check_held(
        shutil.copytree(beginning, tmp_path / str(number)), saved, calls, number, later
    ):
        number += 1
    assert number == 10 if calls == OF_NAMES else number > 30


def test_a_later_start_takes_away_what_an_earlier_one_could_still_publish(tmp_path, saved):
    """And it gives a step its name back that an older version had moved aside."""
    saved.start(tmp_path, 0, [1, 2])
    for name in ("iter_0000009.tmp-x", "iter_0000007.deleted-x"):
        shutil.copytree(tmp_path / "iter_0000002", tmp_path / name)
    (tmp_path / f"{LATEST}.tmp-x").write_text("")
    (tmp_path / "iter_0000002").rename(tmp_path / "iter_0000002.old")
    assert saved.start(tmp_path, 1, []) == 2
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"iter_0000001", "iter_0000002", LATEST, "lock.json"}


@pytest.fixture(scope="module")
def two_starts(tmp_path_factory, saved):
    """Start 1 saved 2, 4 and 6; 6 is damaged. Start 2 went on from 4, and saved 5 and 8."""
    root = tmp_path_factory.mktemp("two")
    saved.start(root, 0, [2, 4, 6])
    flip_bit(root / "iter_0000006" / "model_pp00_tp00of01.safetensors", 4001)
    assert saved.start(root, 1, [5, 8]) == 4
    return root


@pytest.fixture
def root(tmp_path, two_starts):
    return shutil.copytree(two_starts, tmp_path / "steps")


def rewrite(step, drop=(), **values):
    """Changes fields of a manifest, and not its time."""
    path = step / MANIFEST
    time = path.stat().st_mtime_ns
    old = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**old, **values}.items() if k not in drop}))
    os.utime(path, ns=(time, time))


def start_of(root, step):
    return json.loads((root / f"iter_{step:07d}" / MANIFEST).read_text())["start"]


@pytest.mark.parametrize("number", [None, 1, 2**31])
def test_the_number_grows_although_the_lock_was_removed(root, saved, number):
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


def test_a_pointer_of_an_earlier_start_is_followed_only_if_it_was_set_since(root, saved):
    """As a stale start would leave it on a file system where it gets through."""
    (root / LATEST).write_text("4")
    assert candidates(root).steps == [4, 2]
    time = (root / "iter_0000008" / MANIFEST).stat().st_mtime_ns - 1
    os.utime(root / LATEST, ns=(time, time))
    there = candidates(root)
    assert there.fault is None and there.steps == [8, 5, 4, 2]
    before = there._replace(steps=[9])  # which is deleted meanwhile
    notices = newest_good_step(root, before, step_fault, fallback=False, again=[there]).notices
    assert "not followed" in notices[0] and "iter_0000008" in notices[0]
    assert saved.start(root, 2, []) == 8


@pytest.mark.parametrize("step, gone", [(6, ()), (6, (5,)), (9, ())])
def test_a_step_of_an_earlier_start_is_reported_and_not_used(root, saved, step, gone):
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


def test_no_start_touches_a_step_of_a_later_one(root):
    """Even if it holds the lock, as where that was removed by hand and taken again."""
    directory = SaveDirectory(
        root, Holder(job="7", run="r", requeues=0, restarts=9, host="a", pid=1, token="t")
    )
    rewrite(root / "iter_0000004", start=directory.holder.start + 1)
    (root / LOCK).unlink()
    with pytest.raises(LockLost, match="iter_0000004 was saved by a later start"):
        directory.publish(4, leads_here=bool)
    assert (root / "iter_0000004").exists()
    directory._delete(root / "iter_0000005")
    assert not (root / "iter_0000005").exists()
    directory.release()


@pytest.mark.parametrize(
    "numbered", [(), (2, 4), (5, 8), pytest.param((2, 4, 5, 8), id="those of an older version")]
)
def test_steps_without_numbers_are_used_as_before(root, saved, numbered):
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


def test_a_step_that_goes_between_the_pointer_and_the_list_is_told(root, monkeypatch):
    def saved_steps(root):
        shutil.rmtree(root / "iter_0000008")
        return [2, 4, 5, 6]

    monkeypatch.setattr(start, "saved_steps", saved_steps)
    found = candidates(root)
    assert found.steps[0] == 5 and "names iteration 8, which is gone" in (found.fault or "")
