"""A step that is saved a second time, and steps that cannot be set aside: nothing is lost.

What is kept: never less than the flags say, and always the step that was just saved.
"""

import os
import shutil
import signal

from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.checkpointing.directory import SaveDirectory, steps_to_delete
from megatron_lite.checkpointing.start import candidates, newest_good_step, step_fault
from megatron_lite.checkpointing.step_files import LATEST, step_directory
from tests.support.checkpoints import flip_bit
from tests.support.forks import dies_before, status_of_fork
from tests.support.runs import run_to_end
from tests.support.saves import saving_run
from tests.support.starts import saved_model

CHANGES = ("replace", "rename", "unlink", "fsync", "rmdir")


def newest(root):
    return newest_good_step(root, candidates(root), step_fault, fallback=True).step.name


def test_a_kill_while_a_step_is_saved_again_costs_no_step(tmp_path, saved):
    """It is the only one, as after a save whose last sync has failed."""
    number, status, real = 0, -1, SaveDirectory.publish
    while status != 0:
        root = tmp_path / str(number)
        root.mkdir()
        saved.start(root, 0, [6])

        def publish(self, *args, number=number, **options):
            dies_before(number, [(os, name) for name in CHANGES])
            return real(self, *args, **options)

        def killed(root=root, publish=publish):
            SaveDirectory.publish = publish
            saved.start(root, 1, [6])

        status = status_of_fork(killed)
        assert status in (0, -signal.SIGKILL)
        assert newest(root) in ("iter_0000006", "iter_0000006.old")  # of a reader without a lock
        assert saved.start(root, 2, []) == 6  # the next start goes on from it
        assert newest(root) == "iter_0000006" and (root / LATEST).read_text() == "6"
        number += 1
    assert number > 9


def test_a_good_step_beside_its_damaged_successor_is_kept(tmp_path, saved):
    saved.start(tmp_path, 0, [4, 6])
    step = step_directory(tmp_path, 6)
    shutil.copytree(step, step.with_suffix(".old"))
    (step / "model_pp00_tp00of01.safetensors").write_bytes(b"cut")
    assert saved.start(tmp_path, 1, []) == 6
    flip_bit(step / "model_pp00_tp00of01.safetensors", 4001)
    assert saved.start(tmp_path, 2, []) == 4


def test_a_step_that_cannot_be_set_aside_is_a_notice(tmp_path, saved, monkeypatch, capsys):
    saved.start(tmp_path, 0, [2, 4])
    flip_bit(step_directory(tmp_path, 4) / "model_pp00_tp00of01.safetensors", 4001)
    real = os.replace

    def replace(source, target):
        if ".superseded" in str(target):
            raise PermissionError(1, "Operation not permitted", str(source))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert saved.start(tmp_path, 1, [3]) == 2
    assert newest(tmp_path) == "iter_0000003" and (tmp_path / LATEST).read_text() == "3"


@given(
    complete=st.sets(st.integers(1, 60)),
    newest=st.integers(1, 60),
    keep_last=st.integers(0, 5).map(lambda number: number or None),
    retain_interval=st.none() | st.integers(1, 20),
)
def test_the_last_ones_the_nth_ones_and_later_ones_stay_and_nothing_else(
    complete, newest, keep_last, retain_interval
):
    complete |= {newest}
    gone = steps_to_delete(
        sorted(complete), newest=newest, keep_last=keep_last, retain_interval=retain_interval
    )
    for step in complete:
        after_it = len([other for other in complete if step < other <= newest])
        stays = (
            step > newest
            or after_it < (keep_last or 1)
            or (retain_interval is not None and step % retain_interval == 0)
        )
        assert (step in gone) != stays
    assert newest not in gone and gone == sorted(gone)


def test_a_run_keeps_what_the_flags_say(tmp_path):
    run_to_end(
        saving_run(
            tmp_path,
            11,
            load=False,
            save_interval=2,
            async_save=True,
            save_retain_interval=4,
            save_keep_last=3,
        )
    )
    kept = [4, 8, 10, 11]
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("iter_*")) == kept
    assert [step_fault(step_directory(tmp_path, step)) for step in kept] == [None] * len(kept)


def test_incomplete_steps_are_not_counted_and_not_deleted(tmp_path):
    """Two of three steps are cut short: the complete one stays among the last two. The other one
    does not lead to the new step: it is set aside, and then deleted."""
    run_to_end(saving_run(tmp_path, 9, stop=3, load=False))
    for step in (2, 3):
        (tmp_path / f"iter_{step:07d}" / "rng_00000.safetensors").write_bytes(b"")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    # an old one that this version cannot read
    (tmp_path / "iter_0000003").rename(tmp_path / "iter_0000000")
    run_to_end(saving_run(tmp_path, 3, save_interval=None, save_keep_last=2))
    assert names(tmp_path) == ["iter_0000000", "iter_0000001", "iter_0000003"]


def test_steps_that_were_set_aside_go_once_the_run_has_come_as_far(tmp_path):
    """With a flag that deletes; without one they stay for ever."""
    with saved_model() as saved:
        saved.start(tmp_path, 0, [1, 2, 4, 5, 9])
        (tmp_path / "iter_0000002" / "rng_00000.safetensors").write_bytes(b"")
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
        saved.start(tmp_path, 1, [3])
        aside = [f"iter_000000{step}.superseded" for step in (2, 4, 5, 9)]
        assert names(tmp_path) == sorted(["iter_0000001", "iter_0000003", *aside])
        saved.start(tmp_path, 2, [4], save_keep_last=3)
        assert names(tmp_path) == sorted(
            ["iter_0000001", "iter_0000003", "iter_0000004", *aside[2:]]
        )
        saved.start(tmp_path, 3, [8], save_keep_last=1)
        assert names(tmp_path) == sorted(["iter_0000008", aside[3]])
        saved.start(tmp_path, 4, [10])
        assert names(tmp_path) == sorted(["iter_0000008", "iter_0000010", aside[3]])


def names(root):
    return sorted(path.name for path in root.glob("iter_*"))
