"""benchmarks/data.py: every row has a time and a memory for each engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.data import main, measured
from benchmarks.data_engines import OURS


def test_every_row_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "data.json"
    words = "--lines 20 --documents 500 --reads 20 --blend 1000 --datasets 3 --seq-length 64"
    assert main([*words.split(), "--repeats", "1", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    names = ["preprocess", "open", "sample index", "load", "blend index"]
    assert [row["what"] for row in report["rows"] if row["engine"] == OURS] == names
    assert all(row["seconds"] > 0 and len(row["samples_s"]) == 1 for row in report["rows"])
    assert all(row["ratio"] == [1.0] * 3 for row in report["rows"] if row["engine"] == OURS)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(report["rows"])


def test_the_memory_is_what_an_action_allocates() -> None:
    clock = iter(range(10)).__next__
    seconds, added = measured(lambda: np.ones(4 << 20), lambda: float(clock()))
    assert seconds == 1.0 and 32 << 20 <= added < 40 << 20
    with pytest.raises(RuntimeError, match="a measured action failed"):
        measured(lambda: 1 // 0, lambda: 0.0)
