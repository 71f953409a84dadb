"""benchmarks/recompute_cost.py on a tiny model: its report, and the tables made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import recompute_cost
from tests.support.uncompiled import uncompiled_kernels


def test_the_report_has_every_engine_and_the_page_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncompiled_kernels(monkeypatch)
    monkeypatch.setattr(recompute_cost, "starts", lambda arguments: {"eager": 1.0})
    page, report = tmp_path / "page.md", tmp_path / "cost.json"
    page.write_text(f"before\n{recompute_cost.BEGIN}{recompute_cost.END}after\n")
    flags = f"--preset tiny --repeats 1 --dtype bf16 --dropout 0.1 --json {report} --output {page}"
    assert recompute_cost.main(flags.split()) == 0
    written = json.loads(report.read_text())
    assert len(written["steps"][0]["ms"]) == 6
    text = page.read_text()
    assert recompute_cost.figures(written) in text
    assert text.startswith("before") and text.endswith("after\n")
    assert torch.get_num_threads() == 1
