"""A read that the system refuses is no damage: it is tried again, and then the run stops. It never
falls back to an earlier step for it."""

import errno
import os
import shutil

import pytest

from megatron_lite.checkpointing import saver, shards
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config import input_file
from megatron_lite.config.checks import InputError
from megatron_lite.config.logging_settings import LOG_FILE
from megatron_lite.tools import generate
from tests.support.mutants import replaces
from tests.support.runs import run_to_end
from tests.support.saves import saving_run

NEWEST = "iter_0000002"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun") / "steps"
    run_to_end(saving_run(folder, 2, load=False))
    return folder


@pytest.fixture
def steps(tmp_path, begun):
    return shutil.copytree(begun, tmp_path / "steps")


def refusing(patch, name, number, *, times):
    """os.open refuses the file of this name so many times. Returns a function that counts."""
    real, calls = os.open, 0

    def refused(path, *arguments, **named):
        nonlocal calls
        if str(path).endswith(name):
            calls += 1
            if calls <= times:
                raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **named)

    patch.setattr(os, "open", refused)
    patch.setattr(input_file, "PAUSES_S", (0.0, 0.0))
    return lambda: calls


NUMBERS = pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
FILES = pytest.mark.parametrize(
    "name",
    [
        f"{NEWEST}/manifest.json",
        f"{NEWEST}/config.json",
        f"{NEWEST}/rng_00000.safetensors",
        f"{NEWEST}/model_pp00_tp00of01.safetensors",
        LATEST,
    ],
)


@pytest.mark.runs(daily=2, ci=4)
@NUMBERS
@FILES
def test_a_read_that_is_always_refused_stops_the_run(number, name, steps, monkeypatch):
    before = {path: path.read_bytes() for path in steps.rglob("*.*") if path.name != "lock.json"}
    calls = refusing(monkeypatch, name, number, times=10**6)
    with pytest.raises((InputError, OSError), match=os.strerror(number)):
        run_to_end(saving_run(steps, 3))
    assert calls() >= 3
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in before} == before
    assert generate.main(f"--load {steps} --prompt 1 --max-new-tokens 1".split()) == 0


@pytest.mark.runs(ci=4)
@NUMBERS
@FILES
def test_a_read_that_is_refused_for_a_moment_is_tried_again(number, name, steps, monkeypatch):
    refusing(monkeypatch, name, number, times=2)
    assert run_to_end(saving_run(steps, 3)).progress.iteration == 3
    text = (steps / LOG_FILE).read_text()
    assert "loaded the checkpoint of iteration 2" in text and "warning" not in text


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_that_fails_once_is_tried_again(async_save, tmp_path, monkeypatch):
    faults = [OSError(errno.EIO, "no answer")]

    @replaces("save_file", shards)
    def failing(save_file, *given, **named):
        if faults:
            raise faults.pop()
        save_file(*given, **named)

    failing(monkeypatch)
    monkeypatch.setattr(saver, "PAUSES_S", (0.0,))
    run_to_end(saving_run(tmp_path / "steps", 2, load=False, async_save=async_save))
    assert not faults and "warning" not in (tmp_path / "steps" / LOG_FILE).read_text()
    assert len(list(tmp_path.glob("steps/iter_*"))) == 2


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize(
    "name",
    [LATEST, "lock.json", f"{NEWEST}/new.jsonl", f"{NEWEST}.superseded/new.jsonl", "../link.jsonl"],
)
def test_metrics_never_go_onto_a_file_of_a_checkpoint(steps, name):
    (steps.parent / "link.jsonl").symlink_to(steps / NEWEST / "metadata.json")
    before = {path: path.read_bytes() for path in steps.rglob("iter_*/*.json")}
    config = saving_run(steps, 3, metrics=steps / name)
    with pytest.raises(InputError, match="belongs to a checkpoint|holds no metrics of a run"):
        run_to_end(config)
    assert {path: path.read_bytes() for path in before} == before != {}
