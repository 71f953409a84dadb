"""benchmarks/candidates.py: docs/performance.md has the table of the results file."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.candidates import BEGIN, CANDIDATES, END, Row, table

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_table_of_the_results_and_every_candidate() -> None:
    report = json.loads((ROOT / "benchmarks/results/cpu/candidates.json").read_text())
    page = (ROOT / "docs/performance.md").read_text().split(BEGIN)[1].split(END)[0]
    rows = [Row(**row) for row in report["rows"]]
    assert table(rows) in page
    assert [(row.name, row.predicted, row.kept) for row in rows] == [
        (one.name, one.predicted, one.kept) for one in CANDIDATES
    ]
