"""A page fits the about 900 pixels that GitHub gives it: no block and no table scrolls sideways."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.docs.marks import PAGES, ROOT, blocks, name_of

CHECKED = [*PAGES, *sorted((ROOT / "examples").rglob("README.md"))]
MOST_COLUMNS = 100  # of a block
# Pixels. A browser wraps a cell at spaces and after hyphens, so that a column is at least as wide
# as its longest word. The letters of a text are narrower than this on average, those of code are
# all 8.2 wide; code and cells have a padding.
MOST, OF_A_LETTER, OF_CODE, CODE_PADDING, CELL_PADDING = 880.0, 7.8, 8.2, 5.4, 27.0


@pytest.mark.parametrize("page", CHECKED, ids=name_of)
def test_no_line_of_a_block_is_too_long(page: Path) -> None:
    assert [
        line
        for block in blocks(page)
        if block.language != "table"
        for line in block.lines
        if len(line) > MOST_COLUMNS
    ] == []


@pytest.mark.parametrize("page", CHECKED, ids=name_of)
def test_no_table_is_too_wide(page: Path) -> None:
    wide = [(table[0], width_of(table)) for table in tables(page)]
    assert [(head, width) for head, width in wide if width > MOST] == []


def test_the_width_of_a_table_is_that_of_its_longest_words() -> None:
    pair = ["| a | `bb` |", "|---|---|", "| several short words | [link](a_long_file_name.md) |"]
    several, link = 7 * OF_A_LETTER, 4 * OF_A_LETTER
    assert width_of(pair) == pytest.approx(several + link + 2 * CELL_PADDING)
    code = ["| `--a-long-flag` |", "|---|"]
    assert width_of(code) == pytest.approx(5 * OF_CODE + CELL_PADDING)
    assert width_of(["| " + "`x_" * 60 + "` |", "|---|"]) > MOST


def tables(page: Path) -> Iterator[list[str]]:
    """The rows of every table, with its heading and the line under it."""
    rows: list[str] = []
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            rows.append(line)
        elif rows:
            yield rows
            rows = []


def width_of(table: Sequence[str]) -> float:
    """The least width of a table in pixels."""
    rows = [re.split(r"(?<!\\)\|", row.strip())[1:-1] for row in [table[0], *table[2:]]]
    columns = max(map(len, rows))
    return sum(
        CELL_PADDING + max(longest_word(row[number]) for row in rows if number < len(row))
        for number in range(columns)
    )


def longest_word(cell: str) -> float:
    """The width of the longest part of a cell that cannot be wrapped."""
    cell = re.sub(r"<!--.*?-->", "", cell)
    cell = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell)
    longest = width = 0.0
    for number, part in enumerate(cell.split("`")):
        is_code = number % 2 == 1
        width += CODE_PADDING * is_code
        for word in re.split(r"(\s+|(?<=-))", part):
            if word and not word.isspace():
                width += len(word) * (OF_CODE if is_code else OF_A_LETTER)
            else:
                longest, width = max(longest, width), 0.0
        width += CODE_PADDING * is_code
    return max(longest, width)
