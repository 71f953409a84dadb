"""The picture of benchmarks/recompute.py."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.pareto import Point, beyond_our_front, front, main, settings_of

NONE, UNIT, WASTEFUL = (
    Point("none", 10.0, 1.0),
    Point("uniform 1", 4.0, 1.2),
    Point("block 2", 11.0, 1.1),
)


def test_the_front_leaves_out_what_another_point_beats() -> None:
    assert front([NONE, WASTEFUL, UNIT]) == [UNIT, NONE]


def test_a_peer_is_beyond_the_front_where_each_of_ours_is_larger_or_slower() -> None:
    matched, smaller = (
        Point("torch layers, reentrant", 4.0, 1.2),
        Point("transformers, reentrant", 3.0, 1.2),
    )
    faster = Point("torch mlp, reentrant", 4.0, 1.1)
    assert beyond_our_front([NONE, UNIT, matched, smaller, faster]) == [smaller, faster]
    # within the margin
    assert beyond_our_front([NONE, UNIT, Point("torch mlp, reentrant", 4.0, 1.19)]) == []


def _report(**samples: list[float]) -> dict[str, object]:
    """{engine: milliseconds of each round}; smaller names, smaller peaks."""
    rows = [
        dict(
            tp_size=1,
            sequence_parallel=False,
            dtype="bf16",
            dropout=0.1,
            engine=engine.replace("_", " "),
            samples_ms=times,
            peak_bytes=2 ** (24 - number),
        )
        for number, (engine, times) in enumerate(samples.items())
    ]
    return dict(device="CPU", threads=1, torch="2", date="2026-01-01T00:00", rows=rows)


def test_a_time_is_the_median_of_the_ratios_within_each_round_of_all_reports() -> None:
    first, second = (
        _report(none=[1.0, 2.0, 4.0], mlp=[3.0, 4.0, 4.4]),
        _report(none=[1.0, 10.0], mlp=[1.2, 13.0]),
    )
    assert settings_of([first]) == {
        "TP 1, bf16, dropout 0.1": [Point("none", 16.0, 1.0), Point("mlp", 8.0, 2.0)]
    }
    assert settings_of([first, second])["TP 1, bf16, dropout 0.1"][1].time == 1.3


def test_a_report_becomes_a_picture_and_a_status(tmp_path: Path) -> None:
    picture = tmp_path / "p.svg"
    for name, report, status in (
        ("a.json", _report(none=[1.0], mlp=[1.1]), 0),
        ("b.json", _report(none=[1.0], mlp=[1.1], torch_mlp=[1.0]), 1),
    ):
        (tmp_path / name).write_text(json.dumps(report))
        assert main([str(tmp_path / name), "--output", str(picture)]) == status
        assert picture.read_text().count("<svg") == 1
