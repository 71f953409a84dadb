"""docs/who-is-right.md: its tables are those that its command makes, and none of our cells says
that training goes wrong."""

from pathlib import Path

import pytest

from benchmarks.who_is_right import BEGIN, END, EQUAL, NUM_OTHERS, TABLES, cells, merged

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "who-is-right.md").read_text()
ROWS = [row for _, make in TABLES.values() for row in make()]


def ours():
    """The name of every row of the page, and our cell of it."""
    for part in PAGE.split(BEGIN)[1].split(END)[0].split("### ")[1:]:
        lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line[:1] == "|"]
        yield from ((line[0], line[-1]) for line in lines[2:])
        _, _, alike = part.partition("Equal in every engine: ")
        yield from ((name, EQUAL) for name in alike.strip().rstrip(".").split("; ") if name)


def test_the_page_has_a_row_for_every_model_and_way():
    assert sorted(name for name, _ in ours()) == sorted(row.name for row in ROWS)


def test_a_policy_of_ours_is_equal_or_an_error_wherever_an_engine_can_know():
    assert [name for name, cell in ours() if "**" in cell] == []


@pytest.mark.weekly
@pytest.mark.timeout(3600)
def test_the_command_makes_our_cells_of_the_page():
    """Of every 12th row: tests/recompute compares what is ours in each."""
    known = dict(ours())
    for row in ROWS[::12]:
        assert merged(cells(row)[NUM_OTHERS:]) == known[row.name], row.name
