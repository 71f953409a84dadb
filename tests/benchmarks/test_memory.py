"""benchmarks/memory.py: it prints a row for each case and names the worst one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.memory import CASES, Row, main, table


def test_the_rows_and_the_worst_case_are_those_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "memory.json"
    assert main(["--only", "few tokens, AdamW", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["ratio"] == row["predicted_bytes"] / row["measured_bytes"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("The worst case is 'few tokens, AdamW': ")
    assert any(line.startswith("few tokens, AdamW ") for line in lines)


def test_text_that_no_row_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "no such row"])
    assert ended.value.code == 2
    assert "no row has this text" in capsys.readouterr().err


def test_names_are_unique_and_fit_their_column() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) and max(map(len, names)) < 40
    row = Row(name="a", rank=1, predicted_bytes=3 << 20, measured_bytes=2 << 20, moment="now")
    assert next(table([row])).split() == ["a", "1", "3.000", "2.000", "1.5000", "now"]
