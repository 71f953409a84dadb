"""benchmarks/collectives.py as a user starts it: each collective and each step has a row for both
ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.collectives import ALONE, LAYOUTS, WAYS
from tests.benchmarks.test_parallel import run_benchmark

pytestmark = pytest.mark.long


def test_every_action_has_a_row_for_each_way(tmp_path: Path) -> None:
    flags = "--kib 16 64 --shape tiny --repeats 1 --steps 1"
    rows = run_benchmark("collectives.py", tmp_path, *flags.split())["rows"]
    assert [(row["name"], row["way"], row["kib"]) for row in rows] == [
        *(
            (name, way, kib)
            for kib in (16, 64)
            for name in ("all-reduce", "all-gather", "reduce-scatter")
            for way in WAYS
        ),
        (ALONE, "2 threads", None),
        *((name, way, None) for name in LAYOUTS for way in WAYS),
    ]
    for row in rows:
        assert row["ms"] > 0.0
        if row["way"] == "gloo" and row["kib"]:
            assert row["wall_ratio"] == row["cpu_ratio"] == [1.0, 1.0, 1.0]
