"""The picture of benchmarks/recompute.py."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.pareto import Point, beyond_our_front, front, main

NONE, UNIT, WASTEFUL = Point("none", 10.0, 1.0), Point("uniform 1", 4.0, 1.2), Point("block 2", 11.0, 1.1)


def test_the_front_leaves_out_what_another_point_beats() -> None:
    assert front([NONE, WASTEFUL, UNIT]) == [UNIT, NONE]


def test_a_peer_is_beyond_the_front_where_each_of_ours_is_larger_or_slower() -> None:
    matched, smaller = Point("torch layers, reentrant", 4.0, 1.2), Point("transformers, reentrant", 3.0, 1.2)
    faster = Point("torch mlp, reentrant", 4.0, 1.1)
    assert beyond_our_front([NONE, UNIT, matched, smaller, faster]) == [smaller, faster]
    assert beyond_our_front([NONE, UNIT, Point("torch mlp, reentrant", 4.0, 1.19)]) == []  # within the margin


def test_a_report_becomes_a_picture_and_a_status(tmp_path: Path) -> None:
    def row(engine: str, peak_bytes: int, time: float) -> dict[str, object]:
        return dict(tp_size=1, sequence_parallel=False, dtype="bfloat16", dropout=0.1, engine=engine, peak_bytes=peak_bytes,
                    time_ratio=[time, time, time])

    report = dict(device="CPU", threads=1, torch="2", date="2026-01-01T00:00",
                  rows=[row("none", 2**24, 1.0), row("mlp", 2**23, 1.1)])
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert main([str(tmp_path / "r.json"), "--output", str(tmp_path / "p.svg")]) == 0
    assert (tmp_path / "p.svg").read_text().count("<svg") == 1
    report["rows"].append(row("torch mlp, reentrant", 2**22, 1.0))  # type: ignore[attr-defined]
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert main([str(tmp_path / "r.json"), "--output", str(tmp_path / "p.svg")]) == 1
