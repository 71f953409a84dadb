"""benchmarks/candidates.py: docs/performance.md has the table of the results file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.candidates import (
    BEGIN,
    CANDIDATES,
    END,
    OF_VOCABULARY,
    OTHER_MARKS,
    Candidate,
    part_of,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "candidates", "marks"),
    [
        ("candidates", CANDIDATES, (BEGIN, END)),
        ("candidates_vocabulary", OF_VOCABULARY, OTHER_MARKS),
    ],
)
def test_the_page_has_the_table_of_the_results_and_every_candidate(
    name: str, candidates: Sequence[Candidate], marks: tuple[str, str]
) -> None:
    report = json.loads((ROOT / f"benchmarks/results/cpu/{name}.json").read_text())
    page = (ROOT / "docs/performance.md").read_text().split(marks[0])[1].split(marks[1])[0]
    assert page == part_of(report)
    assert [(row["name"], row["predicted"], row["kept"]) for row in report["rows"]] == [
        (one.name, one.predicted, one.kept) for one in candidates
    ]
