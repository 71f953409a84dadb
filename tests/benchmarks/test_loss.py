"""benchmarks/loss.py: every row computes the same loss, and only the rows in chunks stay below the
logits' bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.loss import KEPT, main


def test_only_the_rows_in_chunks_stay_below_the_logits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "loss.json"
    sizes = (
        "--tokens 96 --hidden-size 8 --vocab-size 2048 --chunk-size 8 16 --repeats 1 --threads 1"
    )
    assert main([*f"--device cpu --dtype float32 {sizes} --json".split(), str(file)]) == 0
    rows = {row["engine"]: row for row in json.loads(file.read_text())["rows"]}
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)
    assert {KEPT, "chunks of 8", "chunks of 16", "torch, plain"} <= set(rows)
    for name, row in rows.items():
        assert row["loss"] == pytest.approx(rows[KEPT]["loss"], rel=1e-6)
        in_chunks = name not in (KEPT, "torch, plain")
        assert (row["peak_bytes"] < row["logits_bytes"] == 4 * 96 * 2048) == in_chunks, name
        assert row["ms"] > 0.0 and len(row["samples_ms"]) == 1
