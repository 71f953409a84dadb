"""Every figure and every block of output on the pages is made by a command, and is not stale."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import figures, outputs
from tests.docs.generate import difference, is_quick
from tests.docs.marks import (
    COMMANDS,
    GENERATED,
    INLINE,
    PAGES,
    ROOT,
    THEIR_BEGIN,
    THEIR_END,
    blocks,
)

BLOCKS = [block for page in PAGES for block in blocks(page)]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_what_is_made_of_results_and_of_the_package_is_not_stale(page: Path) -> None:
    assert difference(page, is_quick) == ""


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_what_commands_print_is_not_stale(page: Path) -> None:
    if any(block.kind in ("output of", "printed") for block in blocks(page)):
        assert difference(page) == ""


@pytest.mark.long
@pytest.mark.parametrize("path", figures.FILES, ids=lambda path: path.name)
def test_a_picture_is_not_stale(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == figures.FILES[path]()


def test_every_block_has_a_mark_that_fits_it() -> None:
    assert len(BLOCKS) > 40
    wrong = [
        block.name
        for block in BLOCKS
        if not block.kind
        or (block.language in COMMANDS) is not (block.kind in ("run", "not run"))
        or (block.kind in ("not run", "not output") and not block.value)
    ]
    assert wrong == []


# Numbers with a unit that are no results: limits and rules of the program, which its tests check,
# and what is said of the past or of this project's own tests.
RULES = (
    *("80GiB", "4GiB", "256 MiB", "64 MiB", "4 KiB", "1 GiB and 3%", "0.05%", "more than 10%"),
    *("0.2 ms for the start", "every 30 seconds", "after 15\nseconds"),
    *(
        "errors was 19.2%",
        "it was about 11.7%",
        "than 8 minutes",
        "20 minutes and",
        "35 minutes of",
        "within 5% of real",
        "between 0.3% below and 1%",
        "workspaces of 32 MiB",
        "of 10 MiB and more up to 2 MiB where the rest is at most 1 MiB",
    ),
)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_figure_with_a_unit_has_a_mark(page: Path) -> None:
    lines = page.read_text().splitlines()
    for block in blocks(page):
        lines[block.start : block.stop] = [""] * (block.stop - block.start)
    text = "\n".join(lines)
    theirs = rf"{THEIR_BEGIN.pattern}.*?{THEIR_END.pattern}"
    text = re.sub(theirs, "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`|<!--.*?-->", "", INLINE.sub("", text), flags=re.DOTALL)
    for rule in sorted(RULES, key=len, reverse=True):
        text = text.replace(rule, "")
    unit = r"(?:%|[KMG]iB|ms\b|seconds\b|minutes\b|times as\b)"
    assert re.findall(rf"\b\d[\d.,]*\s?{unit}[^\n]*", text) == []


def test_every_function_and_record_is_used() -> None:
    """One that no page names would be kept for nothing."""
    named = {(block.kind, block.value) for block in BLOCKS if block.kind in GENERATED}
    assert {value for kind, value in named if kind == "made by"} == set(figures.TEXTS)
    assert {value for kind, value in named if kind == "record"} == set(outputs.COMMANDS)
    inline = {name for page in PAGES for name, _ in INLINE.findall(page.read_text())}
    assert inline == set(figures.FIGURES)
    shown = "".join(page.read_text() for page in PAGES)
    assert all(path.relative_to(ROOT).name in shown for path in figures.FILES)
