"""The releases of torch that the short suite has run with: `python -m tests.docs.torch_versions`

tests/torch_versions.sh runs the tests with each release, and this module on their reports. The
results lie in docs/records/torch_versions.json, one row for each release.
"""

import argparse
import json
import platform
import sys
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from tests.docs.marks import ROOT

RECORD = ROOT / "docs" / "records" / "torch_versions.json"
HEAD = "| torch | passed | failed | skipped | Python | day |\n|---|---|---|---|---|---|"


def row(report, day):
    """Returns the result of a run, from the report VERSION.xml that pytest has written."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    keys = ("tests", "failures", "errors", "skipped")
    tests, failures, errors, skipped = (int(suite.attrib[key]) for key in keys)
    return {
        "torch": report.stem,
        "passed": tests - failures - errors - skipped,
        "failed": failures + errors,
        "skipped": skipped,
        "python": platform.python_version(),
        "day": day.isoformat(),
    }


def table(rows):
    """Returns the rows as a table, the oldest release first."""
    lines = [
        "| {torch} | {passed:,} | {failed:,} | {skipped:,} | {python} | {day} |".format(**one)
        for one in sorted(rows, key=lambda one: _number(one["torch"]))
    ]
    return "\n".join([HEAD, *lines])


def recorded():
    """Returns the rows of the record."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def _number(version):
    return tuple(int(part) for part in version.split("."))


def main(argv=None):
    """Prints the table of some reports. Returns 1 if a test failed or none ran, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs.torch_versions")
    parser.add_argument("--write", action="store_true", help="put the rows into the record")
    parser.add_argument("reports", nargs="+", type=Path, help="VERSION.xml of each release")
    args = parser.parse_args(argv)
    rows = [row(report, date.today()) for report in args.reports]
    print(table(rows))
    if args.write:
        kept = {one["torch"]: one for one in (*recorded(), *rows)}
        ordered = sorted(kept.values(), key=lambda one: _number(one["torch"]))
        RECORD.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    return int(any(one["failed"] or not one["passed"] for one in rows))


if __name__ == "__main__":
    sys.exit(main())
