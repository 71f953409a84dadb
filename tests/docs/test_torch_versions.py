"""One range of torch: in setup.py, in messages of the library, in the script and on the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from megatron_lite.parallel.torch_internals import FIRST_UNTRIED, OLDEST
from tests.docs import torch_versions
from tests.docs.marks import ROOT

SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
SCRIPT = ROOT / "tests" / "torch_versions.sh"
REPORT = (
    '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="1210">'
    "</testsuite></testsuites>"
)


def release(version: str) -> tuple[int, ...]:
    """Returns (2, 13) of "2.13" and of "2.13.0"."""
    return tuple(int(part) for part in version.split("."))[:2]


def test_setup_allows_the_range_that_messages_name_and_the_pinned_release_is_in_it() -> None:
    assert re.findall(r'"torch>=([\d.]+),<([\d.]+)"', SETUP) == [(OLDEST, FIRST_UNTRIED)]
    (pinned,) = re.findall(
        r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M
    )
    assert release(OLDEST) <= release(pinned) < release(FIRST_UNTRIED)


def test_the_script_tries_the_oldest_and_the_newest_release_of_the_range() -> None:
    defaults = dict(re.findall(r"^(OLDEST|NEWEST)=([\d.]+)$", SCRIPT.read_text("utf-8"), re.M))
    assert release(defaults["OLDEST"]) == release(OLDEST)
    major, minor = release(defaults["NEWEST"])
    assert (major, minor + 1) == release(FIRST_UNTRIED)


def test_the_results_on_the_page_are_of_the_ends_of_the_range_and_without_failures() -> None:
    rows = {release(row["torch"]): row for row in torch_versions.recorded()}
    major, minor = release(FIRST_UNTRIED)
    assert set(rows) == {release(OLDEST), (major, minor - 1)}
    for row in rows.values():
        assert row["failed"] == 0 < row["passed"]
        date.fromisoformat(row["day"])
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    assert f"`torch>={OLDEST},<{FIRST_UNTRIED}`" in page
    assert torch_versions.table(rows.values()) in page


def test_a_row_has_the_counts_of_a_report(tmp_path: Path) -> None:
    report = tmp_path / "2.8.0.xml"
    report.write_text(REPORT, encoding="utf-8")
    row = torch_versions.row(report, date(2026, 11, 26))
    assert {key: row[key] for key in ("torch", "passed", "failed", "skipped", "day")} == {
        "torch": "2.8.0",
        "passed": 1204,
        "failed": 3,
        "skipped": 3,
        "day": "2026-11-26",
    }
    other = {**row, "torch": "2.14.1"}
    lines = torch_versions.table([other, row]).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["2.8.0", "2.14.1"]
    assert lines[2].startswith("| 2.8.0 | 1,204 | 3 | 3 |")


@pytest.mark.parametrize(("failed", "status"), [(0, 0), (2, 1)])
def test_the_script_uses_an_environment_that_is_there(
    tmp_path: Path, failed: int, status: int
) -> None:
    """Its `pytest` writes a report; nothing is installed."""
    programs = tmp_path / "torch-9.9.9" / "bin"
    programs.mkdir(parents=True)
    (programs / "pytest").touch(mode=0o755)
    python = programs / "python"
    python.write_text(
        "#!/usr/bin/env bash\n"
        "while [[ $# -gt 0 && $1 != --junitxml ]]; do\n"
        '    if [[ $1 == tests.docs.torch_versions ]]; then exec "$REAL" -m "$@"; fi\n'
        "    shift\n"
        "done\n"
        f"""echo '<testsuite tests="5" failures="{failed}" errors="0" skipped="1"/>' >"$2"\n""",
        encoding="utf-8",
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", SCRIPT, "--folder", tmp_path, "9.9.9"],
        env={**os.environ, "REAL": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert f"| 9.9.9 | {4 - failed} | {failed} | 1 |" in done.stdout
    assert "download" not in done.stderr
