"""docs/who-is-right.md: its tables are those that its command makes, and none of our cells says
that training goes wrong."""

import itertools
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks import who_is_right
from benchmarks.who_is_right import (
    BEGIN,
    END,
    ENGINES,
    NOT_APPLICABLE,
    NUM_OTHERS,
    OURS,
    TABLES,
    UNSEEN,
    main,
)
from tests.support.mutants import replaces

PATH = Path(__file__).resolve().parents[2] / "docs" / "who-is-right.md"
PAGE = PATH.read_text()
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
    silent = [
        name
        for name, cells in rows()
        if cells[engine].startswith("**") and (name not in UNSEEN or "verify" in engine)
    ]
    assert silent == []


@pytest.mark.weekly
@pytest.mark.timeout(3600)
def test_the_command_makes_the_tables_of_the_page(tmp_path, monkeypatch):
    """Every third row is trained. The cells of the others, and one that takes 20 seconds until it
    counts as endless, are those of the page: tests/recompute compares what is ours in each."""
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    if (
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__},"
        not in PAGE
    ):
        pytest.skip("the page was made with other versions")
    trained, of_page, numbers = [], dict(rows()), itertools.count()

    def cells_of(real, row):
        found = of_page[row.name]
        if next(numbers) % 3 or any("hangs" in cell for cell in found.values()):
            return list(found.values())
        trained.append(row.name)
        return real(row)

    replaces("cells", who_is_right)(cells_of)(monkeypatch)
    main(["--output", str(page)])
    assert len(trained) > 15
    assert without_rounding(page.read_text()) == without_rounding(PAGE)


def without_rounding(page):
    """The page without what depends on how a CPU's kernels round, which is never a cell of ours:
    those are equal to the bit."""
    lines = []
    for line in page.splitlines():
        cells = line.split(" | ")
        if len(cells) > 2 and cells[1].isdigit() and cells[2].isdigit():  # of the summary
            cells[1:3] = [str(int(cells[1]) + int(cells[2]))]
        rivals = [cell.replace("equal up to rounding", "equal") for cell in cells[:-1]]
        lines.append(" | ".join([*rivals, cells[-1]]))
    return lines
