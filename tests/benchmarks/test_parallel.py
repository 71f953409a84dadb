"""benchmarks/parallel.py as a user starts it: every layout has its row, trains alike, and receives what was foretold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parallel import ALONE, layouts
from tests.support.commands import ROOT, environment

S, B, H, V, MICRO_BATCHES = 32, 2, 64, 256, 4  # the preset tiny


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    report = tmp_path_factory.mktemp("parallel") / "parallel.json"
    flags = f"--preset tiny --num-layers 4 --dtype float32 --repeats 1 --threads 1 --json {report}"
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks/parallel.py"), *flags.split()], env=environment(), cwd=ROOT,
                          capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in layouts(1))
    return {row["layout"]: row for row in json.loads(Path(report).read_text())["rows"]}


def test_every_layout_has_its_row_and_trains_as_one_process(rows: dict[str, dict[str, Any]]) -> None:
    assert rows.keys() == layouts(1).keys()
    for row in rows.values():
        assert row["loss"] == pytest.approx(rows[ALONE]["loss"], rel=1e-5)


def test_a_pipeline_sends_each_micro_batchs_hidden_states_once(rows: dict[str, dict[str, Any]]) -> None:
    """From the first rank: forward, and from its second stage's backward the gradients of what the other rank sent it."""
    hidden = S * B * H * 4
    assert rows["PP 2"]["received_bytes"]["send"] == MICRO_BATCHES * hidden
    assert rows["PP 2, 2 virtual stages"]["received_bytes"]["send"] == 3 * MICRO_BATCHES * hidden


def test_ranks_that_share_out_states_keep_half_of_them(rows: dict[str, dict[str, Any]]) -> None:
    whole = rows["DP 2"]["kept"]["optimizer"]
    for name in ("DP 2, distributed optimizer", "FSDP 2", "FSDP 2, memory-efficient"):
        assert rows[name]["kept"]["optimizer"] == pytest.approx(whole / 2, rel=0.02)
    assert rows["FSDP 2"]["kept"]["weights"] == pytest.approx(rows["DP 2"]["kept"]["weights"] / 2, rel=0.02)
