"""benchmarks/loss_step.py: the three ways compute the same losses, and the page has its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.loss_step import BEGIN, END, ONE_PASS, TWO_PASSES, WHOLE, Head, Row, main, table

ROOT = Path(__file__).resolve().parents[2]


def test_the_three_ways_compute_the_same() -> None:
    head = Head(48, 16, 320, 20)
    found = []
    for way in (head.whole_logits, head.two_passes, head.one_pass):
        losses = way()
        found.append((losses, head.total.clone()))
    assert torch.equal(found[1][0], found[2][0]) and torch.equal(found[1][1], found[2][1])
    for ours, whole in zip(found[2], found[0], strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_a_small_run_has_the_predicted_peaks(tmp_path: Path) -> None:
    sizes = "--num-layers 2 --hidden-size 64 --seq-length 64 --batch-size 2 --vocab-size 4096"
    file = tmp_path / "new" / "loss_step.json"
    assert main([*f"{sizes} --chunk-size 32 --repeats 1 --json".split(), str(file)]) == 0
    rows = {row["name"]: Row(**row) for row in json.loads(file.read_text())["rows"]}
    assert rows[ONE_PASS].peak_mib <= rows[TWO_PASSES].peak_mib < rows[WHOLE].peak_mib
    for row in rows.values():
        assert row.predicted_mib == pytest.approx(row.peak_mib, rel=0.02)


def test_the_page_has_the_table_of_the_results() -> None:
    report = json.loads((ROOT / "benchmarks/results/cpu/loss_step.json").read_text())
    page = (ROOT / "docs/performance.md").read_text().split(BEGIN)[1].split(END)[0]
    assert table([Row(**row) for row in report["rows"]]) in page
