"""Writes the part of a page that a benchmark makes, between two marks."""

from __future__ import annotations

from pathlib import Path


def replace_part(page: Path, begin: str, end: str, text: str) -> None:
    """Writes `text` into the page between the marks.

    Raises ValueError if the page lacks them.
    """
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    if end not in rest:
        raise ValueError(f"{page} has no {begin.strip()} .. {end.strip()}")
    page.write_text(before + begin + text + end + rest.partition(end)[2], encoding="utf-8")
