"""benchmarks/recompute_cost.py on a tiny model: its report, and the tables made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import recompute_cost
from tests.support.uncompiled import uncompiled_kernels


def test_the_report_has_every_engine_and_the_output_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uncompiled_kernels(monkeypatch)
    monkeypatch.setattr(recompute_cost, "starts", lambda arguments: {"eager": 1.0})
    report = tmp_path / "cost.json"
    flags = f"--preset tiny --repeats 1 --dtype bf16 --dropout 0.1 --json {report}"
    assert recompute_cost.main(flags.split()) == 0
    written = json.loads(report.read_text())
    assert len(written["steps"][0]["ms"]) == 6
    assert recompute_cost.figures(written) in capsys.readouterr().out
    assert torch.get_num_threads() == 1
