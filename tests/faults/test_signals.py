"""SIGTERM, SIGUSR1 or SIGUSR2 to one rank or to the launcher: all ranks stop at the same point, save, and lose nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.indexed import IndexedDatasetWriter
from megatron_lite.training import build
from tests.support.commands import MOCK, SMALL_RUN
from tests.support.happenings import builds_second, happens
from tests.support.programs import program
from tests.support.runs import rows, step_bytes

RUN = [*SMALL_RUN, "--micro-batch-size", "1", "--train-iters", "6", "--eval-interval", "3", "--eval-iters", "2",
       "--tensor-model-parallel-size", "2", "--exit-signal-handler"]
LIMIT_S = 30.0  # what torchrun gives


def _gets(rank: int, place: str, *names: str, iteration: int = 0) -> Callable[[int], None]:
    """The rank gets these signals there, all at once."""
    def send() -> None:
        numbers = [signal.Signals[name] for name in names]
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        for number in numbers:
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    return lambda own: happens(place, send, iteration=iteration) if own == rank else None


def _losses(text: str) -> list[str]:
    return [line for line in text.splitlines() if " loss at iteration " in line]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The run that nothing happens to: its files, and its validation and test losses."""
    folder = tmp_path_factory.mktemp("whole")
    with program([*RUN, *MOCK, "--save", str(folder / "save"), "--metrics-jsonl", str(folder / "rows")], ranks=2) as run:
        assert run.wait() == [0, 0], run.everything()
        losses = _losses(run.output(0))
    assert [line.split()[0] for line in losses] == ["validation", "validation", "test"]
    return folder, losses


@pytest.mark.parametrize(("rank", "place", "names", "iteration"), [
    (1, "forward", ["SIGTERM"], 2), (0, "backward", ["SIGUSR1"], 2), (1, "evaluation", ["SIGUSR2"], 3),
    (0, "saving", ["SIGTERM"], 4), (1, "step", ["SIGTERM", "SIGUSR1"], 3)])
def test_a_signal_in_training_costs_nothing(tmp_path: Path, whole: tuple[Path, list[str]], rank: int, place: str,
                                            names: list[str], iteration: int) -> None:
    """In a step; in the first batch of an evaluation, which is dropped and done again; in a checkpoint, which is finished;
    several signals, before an evaluation that is left to the next start."""
    arguments = [*RUN, *MOCK, "--save-interval", "4", "--save", str(tmp_path / "save"),
                 "--metrics-jsonl", str(tmp_path / "rows")]
    with program(arguments, ranks=2, prepare=_gets(rank, place, *names, iteration=iteration)) as run:
        assert run.wait(timeout=LIMIT_S) == [0, 0], run.everything()
        losses = _losses(run.output(0))
        (line,) = [line for line in run.output(0).splitlines() if line.startswith("exiting at iteration")]
        assert line in [f"exiting at iteration {iteration}: {name} (--exit-signal-handler)" for name in names]
        assert ("is left unfinished" in run.output(0)) == (place == "evaluation")
        assert run.messages() == []
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == str(iteration)
    with program([*arguments, "--load", str(tmp_path / "save")], ranks=2) as run:
        assert run.wait() == [0, 0], run.everything()
        losses += _losses(run.output(0))
    folder, expected = whole
    assert step_bytes(tmp_path / "save", 6) == step_bytes(folder / "save", 6) != {}
    assert rows(tmp_path / "rows") == rows(folder / "rows") and losses == expected


def test_a_signal_in_the_last_evaluation_leaves_it_to_the_next_start(tmp_path: Path, whole: tuple[Path, list[str]]) -> None:
    """The last step is saved by then. The signal comes in the third evaluation batch: the first of those after the last step."""
    arguments = [*RUN, *MOCK, "--save", str(tmp_path)]
    with program(arguments, ranks=2, prepare=_gets(1, "evaluation", "SIGTERM", iteration=6)) as run:
        assert run.wait(timeout=LIMIT_S) == [0, 0], run.everything()
        assert len(_losses(run.output(0))) == 1 and "validation loss is left unfinished: SIGTERM" in run.output(0)
    with program([*arguments, "--load", str(tmp_path)], ranks=2) as run:
        assert run.wait() == [0, 0], run.everything()
        assert _losses(run.output(0)) == whole[1][1:]


@pytest.mark.parametrize("place", ["index", "model"])
@pytest.mark.parametrize(("rank", "name"), [(0, "SIGTERM"), (1, "SIGUSR1")])
def test_before_the_first_iteration_all_stop_at_once(tmp_path: Path, place: str, rank: int, name: str) -> None:
    """One rank builds the index while the other waits for it, or both their models: nothing is saved, and the cache is whole."""
    cache, prefix = tmp_path / "cache", _corpus(tmp_path)
    arguments = [*RUN, "--vocab-size", "98", "--data-path", prefix, "--split", "80,10,10", "--save", str(tmp_path / "save"),
                 "--data-cache-path", str(cache)]

    def prepare(own: int) -> None:
        _gets(rank, place, name)(own)
        if own != rank:
            builds_second(cache)

    began = time.monotonic()
    with program(arguments, ranks=2, prepare=prepare) as run:
        status = 128 + signal.Signals[name]
        assert run.wait(timeout=LIMIT_S) == [status, status], run.everything()
        assert run.messages() == [f"pretrain_gpt.py: [rank {rank}] stops at start-up: {name} (--exit-signal-handler): nothing "
                                  "was trained, nothing is saved"]
        assert "Traceback" not in run.everything()
    assert time.monotonic() - began < LIMIT_S
    assert not list(cache.glob("*.tmp-*")) and not list((tmp_path / "save").glob("iter_*"))
    with program(arguments, ranks=2) as run:
        assert run.wait() == [0, 0], run.everything()


def test_a_signal_to_all_ranks_is_said_once(tmp_path: Path) -> None:
    arguments = [*RUN, "--vocab-size", "98", "--data-path", _corpus(tmp_path), "--split", "80,10,10"]
    with program(arguments, ranks=2, prepare=lambda rank: _gets(rank, "index", "SIGTERM", "SIGUSR1")(rank)) as run:
        assert set(run.wait(timeout=LIMIT_S)) < {128 + signal.SIGTERM, 128 + signal.SIGUSR1}, run.everything()
        assert len(run.messages()) == 1 and "Traceback" not in run.everything()


def test_a_rank_that_no_signal_reaches_and_that_waits_for_nobody_ends_too() -> None:
    def prepare(rank: int) -> None:
        if rank == 0:
            build.build_datasets = lambda *args, **options: threading.Event().wait()  # type: ignore[assignment]
        _gets(1, "model", "SIGTERM")(rank)

    with program([*RUN, *MOCK], ranks=2, prepare=prepare) as run:
        assert run.wait(timeout=LIMIT_S) == [143, 143], run.everything()
        assert len(run.messages()) == 1


def test_without_the_handler_sigterm_kills_and_the_others_say_whom() -> None:
    arguments = [argument for argument in RUN if argument != "--exit-signal-handler"]
    with program([*arguments, *MOCK], ranks=2, prepare=_gets(1, "forward", "SIGUSR1", iteration=2)) as run:
        assert run.wait() == [1, -signal.SIGUSR1], run.everything()
        assert run.messages() == ["pretrain_gpt.py: [rank 0] stops at iteration 2: rank 1 is gone"]


def _corpus(folder: Path) -> str:
    with IndexedDatasetWriter(str(folder / "data"), np.dtype(np.uint16)) as writer:
        for document in range(40):
            writer.add_document(np.arange(30) + document)
    return str(folder / "data")
