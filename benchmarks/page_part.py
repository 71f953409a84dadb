"""Writes what a benchmark found: its report as JSON, and its part of a page between two marks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def publish(
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    report: Mapping[str, Any],
    marks: tuple[str, str],
    text: str,
) -> None:
    """Writes the report to --json and the text to the page --output, if they are given.

    marks: the begin and the end of the part of the page. A page that lacks them ends the program
    with status 2.
    """
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.output:
        try:
            replace_part(Path(args.output), *marks, text)
        except ValueError as error:
            parser.error(str(error))


def replace_part(page: Path, begin: str, end: str, text: str) -> None:
    """Writes `text` into the page between the marks.

    Raises ValueError if the page lacks them.
    """
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    if end not in rest:
        raise ValueError(f"{page} has no {begin.strip()} .. {end.strip()}")
    page.write_text(before + begin + text + end + rest.partition(end)[2], encoding="utf-8")
