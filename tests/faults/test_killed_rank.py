"""A rank that is killed ends the run on all ranks, soon, with its name; the run goes on from its last checkpoint to the same bytes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import MOCK, SMALL_RUN
from tests.support.faults import happens
from tests.support.programs import program
from tests.support.runs import rows, step_bytes

RUN = [*SMALL_RUN, *MOCK, "--micro-batch-size", "1", "--train-iters", "8", "--save-interval", "3", "--eval-interval", "4",
       "--tensor-model-parallel-size", "2", "--recompute-granularity", "full", "--recompute-method", "uniform"]


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed(rank: int, place: str, iteration: int) -> Callable[[int], None]:
    return lambda own: happens(place, _dies, iteration=iteration) if own == rank else None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to: its checkpoints and its rows."""
    folder = tmp_path_factory.mktemp("whole")
    with program([*RUN, "--save", str(folder / "save"), "--metrics-jsonl", str(folder / "rows")], ranks=2) as run:
        assert run.wait() == [0, 0], run.everything()
    return folder


@pytest.mark.parametrize(("place", "iteration", "durable"), [
    ("forward", 5, 3), ("backward", 5, 3), ("replay", 5, 3), ("evaluation", 4, 3), ("forward", 8, 6)])
def test_the_others_name_it_and_the_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, whole: Path, place: str,
                                                                          iteration: int, durable: int) -> None:
    arguments = [*RUN, "--save", str(tmp_path / "save"), "--metrics-jsonl", str(tmp_path / "rows")]
    with program(arguments, ranks=2, prepare=_killed(1, place, iteration)) as run:
        assert run.wait(1) == [-signal.SIGKILL]
        died = time.monotonic()
        assert run.wait(0) == [1], run.everything()
        assert time.monotonic() - died < 15.0
        where = f"iteration {iteration}" + (" (validation loss)" if place == "evaluation" else "")
        assert run.messages() == [f"pretrain_gpt.py: [rank 0] stops at {where}: rank 1 is gone"]
        assert "terminate called" not in run.everything() and "Traceback" not in run.everything()
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == str(durable)
    with program([*arguments, "--load", str(tmp_path / "save")], ranks=2) as run:
        assert run.wait() == [0, 0], run.everything()
    assert step_bytes(tmp_path / "save", 8) == step_bytes(whole / "save", 8) != {}
    assert rows(tmp_path / "rows") == rows(whole / "rows")
