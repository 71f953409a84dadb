"""A step that is saved a second time, and steps that cannot be set aside: nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpointing.directory import SaveDirectory
from megatron_lite.checkpointing.start import candidates, newest_good_step, step_fault
from megatron_lite.checkpointing.step_files import LATEST, step_directory
from tests.support.checkpoints import flip_bit
from tests.support.forks import dies_before, status_of_fork
from tests.support.starts import Saved

CHANGES = ("replace", "rename", "unlink", "fsync", "rmdir")


def newest(root: Path) -> str:
    return newest_good_step(root, candidates(root), step_fault, fallback=True).step.name


def test_a_kill_while_a_step_is_saved_again_costs_no_step(tmp_path: Path, saved: Saved) -> None:
    """It is the only one, as after a save whose last sync has failed."""
    number, status, real = 0, -1, SaveDirectory.publish
    while status != 0:
        root = tmp_path / str(number)
        root.mkdir()
        saved.start(root, 0, [6])

        def publish(self: SaveDirectory, *args: Any, number: int = number, **options: Any) -> Any:
            dies_before(number, [(os, name) for name in CHANGES])
            return real(self, *args, **options)

        def killed(root: Path = root, publish: Any = publish) -> None:
            SaveDirectory.publish = publish  # type: ignore[method-assign]
            saved.start(root, 1, [6])

        status = status_of_fork(killed)
        assert status in (0, -signal.SIGKILL)
        assert newest(root) in ("iter_0000006", "iter_0000006.old")  # of a reader without a lock
        assert saved.start(root, 2, []) == 6  # the next start goes on from it
        assert newest(root) == "iter_0000006" and (root / LATEST).read_text() == "6"
        number += 1
    assert number > 9


def test_a_good_step_beside_its_damaged_successor_is_kept(tmp_path: Path, saved: Saved) -> None:
    saved.start(tmp_path, 0, [4, 6])
    step = step_directory(tmp_path, 6)
    shutil.copytree(step, step.with_suffix(".old"))
    (step / "model_pp00_tp00of01.safetensors").write_bytes(b"cut")
    assert saved.start(tmp_path, 1, []) == 6
    flip_bit(step / "model_pp00_tp00of01.safetensors", 4001)
    assert saved.start(tmp_path, 2, []) == 4


def test_a_step_that_cannot_be_set_aside_is_a_notice(
    tmp_path: Path,
    saved: Saved,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved.start(tmp_path, 0, [2, 4])
    flip_bit(step_directory(tmp_path, 4) / "model_pp00_tp00of01.safetensors", 4001)
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if ".superseded" in str(target):
            raise PermissionError(1, "Operation not permitted", str(source))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert saved.start(tmp_path, 1, [3]) == 2
    assert newest(tmp_path) == "iter_0000003" and (tmp_path / LATEST).read_text() == "3"
