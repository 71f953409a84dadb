"""docs/who-is-right.md: its tables are those that its command makes, and none of our cells says
that training goes wrong."""

from pathlib import Path

import pytest

from benchmarks import who_is_right
from benchmarks.who_is_right import BEGIN, END, ENGINES, NOT_APPLICABLE, NUM_OTHERS, OURS, TABLES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "who-is-right.md").read_text()
GENERATED = PAGE.split(BEGIN)[1].split(END)[0]


def rows():
    """The name of every row, and its cells by engine. Without the summary."""
    for part in GENERATED.split("### ")[1:]:
        lines = [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in part.splitlines()
            if line.startswith("|")
        ]
        _, _, alike = part.partition("Equal in every engine: ")
        names = alike.strip().removesuffix(".").split("; ") if alike else []
        same = [[name, *["equal"] * (len(lines[0]) - 1)] for name in names]
        for name, *cells in [*lines[2:], *same]:
            shown = dict(zip(lines[0][1:], cells, strict=True))
            most, *others = shown.pop(OURS).split("; ")
            ours = {engine.name: most for engine in ENGINES[NUM_OTHERS:]}
            for other in others:
                policy, _, text = other.partition(": ")
                assert f"{OURS}, {policy}" in ours
                ours[f"{OURS}, {policy}"] = text
            absent = {engine.name: NOT_APPLICABLE for engine in ENGINES[:NUM_OTHERS]}
            assert set(shown) <= set(absent)
            yield name, {**absent, **shown, **ours}


def test_the_page_has_a_row_for_every_model_and_way_and_a_column_for_every_engine():
    assert sorted(name for name, _ in rows()) == sorted(
        row.name for _, make in TABLES.values() for row in make()
    )
    assert all(list(cells) == [engine.name for engine in ENGINES] for _, cells in rows())


@pytest.mark.parametrize(
    "engine", [engine.name for engine in ENGINES if engine.name.startswith("ours")]
)
def test_a_policy_of_ours_is_equal_or_an_error_wherever_an_engine_can_know(engine):
    assert [name for name, cells in rows() if cells[engine].startswith("**")] == []


@pytest.mark.weekly
@pytest.mark.timeout(3600)
def test_the_command_makes_our_cells_of_the_page():
    """Of every 12th row: tests/recompute compares what is ours in each."""
    known = dict(rows())
    for row in [row for _, make in TABLES.values() for row in make()][::12]:
        found = dict(zip([engine.name for engine in ENGINES], who_is_right.cells(row), strict=True))
        for name, cell in found.items():
            assert cell == known[row.name][name] or not name.startswith("ours"), (row.name, name)
