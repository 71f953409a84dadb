"""The blocks of code on the pages fit a page: a reader need not scroll sideways to read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.marks import GENERATED, PAGES, ROOT, blocks

HAND_WRITTEN, GENERATED_MOST = 100, 120  # columns; 120 are those of a file or a wide terminal


@pytest.mark.parametrize(
    "page",
    [*PAGES, *sorted((ROOT / "examples").rglob("README.md"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_line_of_a_block_is_too_long(page: Path) -> None:
    found = []
    for block in blocks(page):
        if block.language == "table":
            continue
        most = GENERATED_MOST if block.kind in GENERATED else HAND_WRITTEN
        found += [line for line in block.lines if len(line) > most]
    assert found == []
