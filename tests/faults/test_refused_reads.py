"""A read that the system refuses is no damage: it is tried again, and then the run stops. It never
falls back to an earlier step for it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpointing import write
from megatron_lite.checkpointing.start import step_fault
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config import input_file
from megatron_lite.config.checks import InputError
from megatron_lite.config.logging_settings import LOG_FILE
from megatron_lite.config.run import RunConfig
from megatron_lite.tools import generate
from tests.support.runs import rows, run_to_end, tiny_run

NEWEST = "iter_0000002"


def config_of(folder: Path, *, load: bool = False, last: int = 2, **options: Any) -> RunConfig:
    return tiny_run(
        training=dict(train_iters=last, eval_iters=0),
        checkpoint=dict(
            save=str(folder), save_interval=1, **({"load": str(folder)} if load else {})
        ),
        **options,
    )


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    run_to_end(config_of(tmp_path / "steps"))
    return tmp_path / "steps"


def refusing(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, times: int
) -> Callable[[], int]:
    """os.open refuses the file of this name so many times. Returns a function that counts."""
    real, calls = os.open, 0

    def refused(path: Any, *arguments: Any, **named: Any) -> int:
        nonlocal calls
        if str(path).endswith(name):
            calls += 1
            if calls <= times:
                raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr(input_file, "PAUSES_S", (0.0, 0.0))
    return lambda: calls


NUMBERS = pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
FILES = pytest.mark.parametrize(
    "name",
    [
        f"{NEWEST}/manifest.json",
        f"{NEWEST}/metadata.json",
        f"{NEWEST}/config.json",
        f"{NEWEST}/rng_00000.safetensors",
        f"{NEWEST}/model_pp00_tp00of01.safetensors",
        LATEST,
    ],
)


@NUMBERS
@FILES
def test_a_read_that_is_always_refused_stops_the_run(
    number: int, name: str, steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in steps.rglob("*.*") if path.name != "lock.json"}
    calls = refusing(monkeypatch, name, number, times=10**6)
    with pytest.raises((InputError, OSError), match=os.strerror(number)):
        run_to_end(config_of(steps, load=True, last=3))
    assert calls() >= 3
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in before} == before
    assert generate.main(["--load", str(steps), "--prompt", "1", "--max-new-tokens", "1"]) == 0


@NUMBERS
@FILES
def test_a_read_that_is_refused_for_a_moment_is_tried_again(
    number: int, name: str, steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, name, number, times=2)
    assert run_to_end(config_of(steps, load=True, last=3)).progress.iteration == 3
    text = (steps / LOG_FILE).read_text()
    assert "loaded the checkpoint of iteration 2" in text and "warning" not in text


def test_a_missing_file_is_damage(steps: Path) -> None:
    (steps / NEWEST / "metadata.json").unlink()
    assert "metadata.json: cannot be read" in str(step_fault(steps / NEWEST))


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_that_fails_once_is_tried_again(
    async_save: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = write.save_file, 0

    def failing(tensors: Any, path: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError(errno.EIO, "Input/output error")
        real(tensors, path)

    monkeypatch.setattr(write, "save_file", failing)
    monkeypatch.setattr(write, "PAUSES_S", (0.0,))
    config = tiny_run(
        training=dict(train_iters=2, eval_iters=0),
        checkpoint=dict(save=str(tmp_path), save_interval=1, async_save=async_save),
    )
    run_to_end(config)
    assert "warning" not in (tmp_path / LOG_FILE).read_text()
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000001", NEWEST]


def test_a_run_outlives_a_save_that_fails_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps are trained to the end, and only then the run ends with an error."""
    monkeypatch.setattr(write, "save_file", _no_space)
    monkeypatch.setattr(write, "PAUSES_S", (0.0,))
    metrics = tmp_path / "metrics.jsonl"
    with pytest.raises(InputError, match="iteration 3 could not be written"):
        run_to_end(config_of(tmp_path / "steps", last=3, metrics=metrics))
    assert [row["iteration"] for row in rows(metrics)] == [1, 2, 3]
    assert (tmp_path / "steps" / LOG_FILE).read_text().count("next save is tried as usual") >= 3


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "name",
    [
        LATEST,
        "lock.json",
        f"{NEWEST}/metadata.json",
        f"{NEWEST}/new.jsonl",
        f"{NEWEST}.superseded/new.jsonl",
        "../link.jsonl",
        "../notes.txt",
    ],
)
def test_metrics_never_go_onto_a_file_of_a_checkpoint(steps: Path, name: str) -> None:
    (steps.parent / "link.jsonl").symlink_to(steps / NEWEST / "metadata.json")
    (steps.parent / "notes.txt").write_text("years\nof work\n")
    before = {path: path.read_bytes() for path in steps.rglob("*.json")}
    with pytest.raises(InputError, match="belongs to a checkpoint|holds no metrics of a run"):
        run_to_end(config_of(steps, load=True, last=3, metrics=steps / name))
    after = {path: path.read_bytes() for path in before}
    assert {path for path in before if before[path] != after[path]} <= {steps / "lock.json"}
    assert json.loads((steps / NEWEST / "metadata.json").read_text())["format"]
    assert (steps.parent / "notes.txt").read_text() == "years\nof work\n"
