"""benchmarks/checkpoint.py: every way of saving and loading has its row, and a background save does
not wait for the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.checkpoint import main
from benchmarks.checkpoint_engines import DISK, OURS


def test_every_way_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "checkpoint.json"
    assert (
        main(
            [
                "--preset",
                "tiny",
                "--repeats",
                "2",
                "--steps",
                "2",
                "--threads",
                "1",
                "--directory",
                str(tmp_path),
                "--json",
                str(file),
            ]
        )
        == 0
    )
    report = json.loads(file.read_text())
    rows = {(row["what"], row["engine"]): row for row in report["rows"]}
    for what in ("save", "load"):
        assert [engine for row, engine in rows if row == what] == [
            DISK,
            OURS,
            "safetensors",
            "torch",
            "torch DCP",
        ]
        assert rows[what, DISK]["ratio"] == [1.0, 1.0, 1.0]
    assert all(len(row["samples_s"]) == 2 for row in rows.values()) and report["bytes"] > 10**6
    assert rows["stall", "in the background, waits"]["seconds"] < rows["save", OURS]["seconds"]
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
