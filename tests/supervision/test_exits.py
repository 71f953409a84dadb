"""A run that is told to stop stops after the same iteration on every rank, saves, and goes on as if
nothing had happened."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lite.config.run import RunConfig
from megatron_lite.supervision import exits
from megatron_lite.training import loop
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run, with_checkpoint


def _run(
    rank: int,
    world_size: int,
    config: RunConfig,
    signalled: int | None = None,
    name: str = "SIGTERM",
) -> int:
    """signalled: the rank that gets the signal in its third step. Returns the iteration that it
    came to."""
    if rank == signalled:
        step, count = loop.train_step, iter(range(100))

        def interrupted(*args: object, **options: object) -> object:
            if next(count) == 2:
                os.kill(os.getpid(), signal.Signals[name])
            return step(*args, **options)  # type: ignore[arg-type]

        loop.train_step = interrupted  # type: ignore[assignment]
    return run_to_end(config).progress.iteration


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("SIGINT", marks=pytest.mark.long), "SIGUSR2"])
def test_a_signal_to_one_rank_ends_the_run_on_all_and_nothing_is_lost(
    tmp_path: Path, name: str
) -> None:
    config = tiny_run(training=dict(train_iters=6), tp_size=2)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    logged = {
        where: replace(config.logging, metrics_jsonl=str(tmp_path / where))
        for where in ("a.jsonl", "b.jsonl")
    }
    run_ranks(_run, 2, with_checkpoint(replace(config, logging=logged["a.jsonl"]), save=str(whole)))
    training = replace(config.training, exit_signal_handler=True, exit_signal=name)
    stops = replace(config, training=training, logging=logged["b.jsonl"])
    assert run_ranks(_run, 2, with_checkpoint(stops, save=str(parts)), 1, name) == [3, 3]
    assert run_ranks(_run, 2, with_checkpoint(stops, save=str(parts), load=str(parts))) == [6, 6]
    assert step_bytes(parts, 6) == step_bytes(whole, 6) and rows(tmp_path / "a.jsonl") == rows(
        tmp_path / "b.jsonl"
    )


def test_a_run_ends_after_its_duration_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # the start, then the end of each iteration; whole numbers, so that no difference is rounded
    times = iter([1000.0, 1059.0, 1060.0, 1061.0])
    monkeypatch.setattr(
        exits, "time", type("Clock", (), {"monotonic": staticmethod(lambda: next(times))})
    )
    assert (
        run_to_end(
            tiny_run(training=dict(train_iters=9, exit_duration_in_mins=1))
        ).progress.iteration
        == 3
    )
    assert "exiting at iteration 3: --exit-duration-in-mins 1" in capsys.readouterr().out
