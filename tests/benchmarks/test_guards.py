"""benchmarks/guards.py as a user starts it: every guard has its row."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.guards import NONE
from tests.benchmarks.test_parallel import run_benchmark


@pytest.mark.long
def test_every_guard_has_its_row_and_times_of_every_round(tmp_path: Path) -> None:
    report = run_benchmark(
        "guards.py", tmp_path, "--preset", "tiny", "--repeats", "2", "--threads", "1"
    )
    rows = {row["guard"]: row for row in report["rows"]}
    assert list(rows) == [NONE, "NaN of a rank", "spike", "slow rank", "weight hash"]
    assert all(
        len(row["samples_ms"]) == 2 and min(row["samples_ms"]) > 0.0 for row in rows.values()
    )
    assert rows[NONE]["time_ratio"] == pytest.approx([1.0, 1.0, 1.0])
