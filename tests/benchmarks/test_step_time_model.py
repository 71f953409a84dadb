"""benchmarks/step_time_model.py: every setting of the grid has a measured and a predicted time."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.step_time_model import POLICIES, Row, cases, main, parse, rank_correlation, summary
from tests.plan.machines import ideal


def test_a_tiny_grid_has_a_row_for_every_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, file = tmp_path / "machine.json", tmp_path / "rows.json"
    machine.write_text(json.dumps(asdict(ideal(device="cpu"))))
    arguments = ["--machine", str(machine), "--preset", "tiny", "--repeats", "1", "--tp", "1"]
    assert main([*arguments, "--clock", "cpu", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["rows"]
    assert [row["case"]["policy"] for row in found] == [*POLICIES] * 2
    assert all(row["measured_ms"] > row["predicted_ms"] > 0.0 for row in found)
    assert capsys.readouterr().out.count("rank correlation") == 2


@pytest.mark.long
def test_two_ranks_have_rows_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--machine", "a100-80gb", "--preset", "tiny", "--repeats", "1", "--tp", "2"]
    assert main([*arguments, "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.count("TP 2") == len(POLICIES) + 1


def test_rank_correlation_is_that_of_the_order() -> None:
    assert rank_correlation([1.0, 2.0, 30.0], [5.0, 6.0, 7.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [9.0, 8.0, 7.0]) == pytest.approx(-1.0)
    # 1 - 6 x 2 / (4 x 15): one pair of neighbours is swapped
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)


def test_the_summary_has_the_median_and_the_extremes_of_the_ratios() -> None:
    case = cases(parse(["--machine", "h200", "--preset", "tiny"]))[0]
    found = [Row(case=case, measured_ms=10.0, predicted_ms=one) for one in (5.0, 10.0, 30.0)]
    assert "median 1.00, from 0.50 to 3.00" in summary(found)
