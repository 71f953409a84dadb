"""A run that stops and is resumed leaves the same bytes as one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run

# world size, TP size, sequence parallel, bf16
LAYOUTS = [
    pytest.param(1, 1, False, False, id="tp1"),
    pytest.param(1, 1, False, True, id="tp1-bf16", marks=pytest.mark.long),
    pytest.param(2, 2, False, False, id="tp2", marks=pytest.mark.long),
    pytest.param(2, 2, True, True, id="tp2-sp-bf16", marks=pytest.mark.long),
    pytest.param(4, 2, True, False, id="tp2-sp-dp2", marks=pytest.mark.long),
]


def _run(
    rank: int,
    world_size: int,
    tp_size: int,
    sequence_parallel: bool,
    bf16: bool,
    folder: Path,
    metrics: Path,
    exit_interval: int | None,
    load: bool,
) -> None:
    run_to_end(
        tiny_run(
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            metrics=metrics,
            training=dict(global_batch_size=2, bf16=bf16, exit_interval=exit_interval),
            checkpoint=dict(save=str(folder), load=str(folder) if load else None),
        )
    )


@pytest.mark.runs(daily=1, ci=3)
@pytest.mark.parametrize(("world_size", "tp_size", "sequence_parallel", "bf16"), LAYOUTS)
def test_ten_iterations_a_restart_and_ten_more_equal_twenty(
    tmp_path: Path, world_size: int, tp_size: int, sequence_parallel: bool, bf16: bool
) -> None:
    """Weights, moments, master weights, random-number streams (dropout is on) and every logged
    loss."""
    common = (tp_size, sequence_parallel, bf16)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(_run, world_size, *common, whole, tmp_path / "whole.jsonl", None, False)
    run_ranks(_run, world_size, *common, parts, tmp_path / "parts.jsonl", 10, False, detail=False)
    assert (parts / "latest_checkpointed_iteration.txt").read_text() == "10"
    run_ranks(_run, world_size, *common, parts, tmp_path / "parts.jsonl", None, True, detail=False)
    assert rows(tmp_path / "parts.jsonl") == rows(tmp_path / "whole.jsonl")
    assert len(rows(tmp_path / "whole.jsonl")) == 20
    expected = step_bytes(whole, 20)
    assert expected and step_bytes(parts, 20) == expected
