"""The generated part of docs/performance-collectives.md, made of the committed results.

`python -m tests.docs.generate --write docs/performance-collectives.md` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "cpu" / "collectives.json"
Row = Mapping[str, Any]


def collectives_part(results: Path = RESULTS) -> str:
    """Returns a table of the collectives and one of the steps."""
    report = json.loads(results.read_text(encoding="utf-8"))
    steps, rows = [], []
    for row in report["rows"]:
        (steps if row["kib"] is None else rows).append(row)
    return "\n".join(
        (
            f"{report['device']}, 2 ranks, torch {report['torch']}, {report['date'][:10]}, medians "
            f"of {report['rounds']} rounds.\n",
            *_collectives(rows),
            "",
            *_steps(steps, report["shape"]),
        )
    )


def _collectives(rows: list[Row]) -> Iterator[str]:
    yield "| collective | KiB | gloo, ms | shared memory, ms | ratio | least to most |"
    yield "|---|---|---|---|---|---|"
    by_gloo = {(row["name"], row["kib"]): row for row in rows if row["way"] == "gloo"}
    for row in rows:
        if row["way"] != "gloo":
            other = by_gloo[row["name"], row["kib"]]
            yield (
                f"| {row['name']} | {row['kib']:,} | {other['ms']:.2f} | {row['ms']:.2f} | "
                f"{_ratio(row)} |"
            )


def _steps(rows: list[Row], shape: Mapping[str, int]) -> Iterator[str]:
    yield (
        f"A step of {shape['num_layers']} layers of hidden size {shape['hidden_size']}, with "
        f"{shape['batch_size']} samples of {shape['seq_length']} tokens, over that of one process "
        "with two threads:\n"
    )
    yield "| ranks | collectives | ms | ratio | least to most |"
    yield "|---|---|---|---|---|"
    for row in rows:
        yield f"| {row['name']} | {row['way']} | {row['ms']:.0f} | {_ratio(row)} |"


def _ratio(row: Row) -> str:
    middle, least, most = row["wall_ratio"]
    return f"{middle:.2f} | {least:.2f} to {most:.2f}"
