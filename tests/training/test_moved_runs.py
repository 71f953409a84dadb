"""A run that continues on another kind of processor is told that its low bits can change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpointing.metadata import Metadata
from megatron_lite.checkpointing.step_files import step_directory
from megatron_lite.training import loop
from tests.support.runs import run_to_end, tiny_run

ELSEWHERE = "GenuineIntel CPU with AVX2, 1 thread a rank, torch 2.13.0"


def _run(folder: Path, *, iterations: int = 2, load: bool = False, **checkpoint: Any) -> None:
    chosen = dict(save=str(folder), load=str(folder) if load else None, **checkpoint)
    run_to_end(tiny_run(train_iters=iterations, eval_iters=0, **chosen))


def _told(output: str) -> list[str]:
    return [line for line in output.splitlines() if "the checkpoint was computed on" in line]


def test_a_run_on_the_same_processor_is_told_nothing_and_one_on_another_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path)
    kept = Metadata.read(step_directory(tmp_path, 2)).computed_on
    assert kept == loop.described(torch.device("cpu"))
    _run(tmp_path, iterations=3, load=True)
    assert _told(capsys.readouterr().out) == []
    monkeypatch.setattr(loop, "described", lambda *_: ELSEWHERE)
    _run(tmp_path, iterations=4, load=True)
    (line,) = _told(capsys.readouterr().out)
    assert kept in line and ELSEWHERE in line
    assert Metadata.read(step_directory(tmp_path, 4)).computed_on == ELSEWHERE
