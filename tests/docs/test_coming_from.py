"""docs/coming-from.md: every row of its tables is translated and priced."""

import json
import re
import shlex
from functools import lru_cache
from typing import NamedTuple

import pytest

from arguments import parse_args
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.kept_tensors import activation_bytes
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.tools.translators import PARTITIONING, translated
from tests.docs.marks import text_of
from tests.support.pairs import in_one_test

PAGE = text_of("coming-from")
MODEL = shlex.split(re.search(r"```\n(--num-layers [^`]*)```", PAGE)[1])


class Row(NamedTuple):
    """system: the heading above. theirs: JSON, or flags of Megatron. ours: flags."""

    system: str
    theirs: str
    ours: tuple[str, ...]
    figure: str
    tp_size: int


def tables():
    """(heading above, last cell of the table's head, cells) of every row on the page."""
    heading = last = ""
    for line, following in zip(PAGE.splitlines(), [*PAGE.splitlines()[1:], ""], strict=True):
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("|"):
            cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
            if following.startswith("|---"):
                last = cells[-1]
            elif not line.startswith("|---"):
                yield heading, last, cells


ROWS = [
    Row(
        heading.lower(),
        cells[0],
        tuple(shlex.split(cells[1])),
        cells[2],
        2 if last.endswith("at TP 2") else 1,
    )
    for heading, last, cells in tables()
    if last.startswith("bytes")
]
HERE = ("torchtitan", "here")


@lru_cache
def parsed(words, tp_size):
    """The run of the page's model with these flags."""
    return parse_args([*MODEL, "--tensor-model-parallel-size", str(tp_size), *words]).config


def run_of(row):
    return parsed(row.ours, row.tp_size)


@in_one_test("row", [row for row in ROWS if row.system != "megatron"])
def test_the_preset_gives_the_flags_of_the_row(row):
    size = row.tp_size if row.system in PARTITIONING else None
    assert translated(json.loads(row.theirs), row.system, size).flags == row.ours


@in_one_test("row", [row for row in ROWS if row.system == "megatron"])
def test_megatrons_flags_give_the_plan_of_the_policy(row):
    theirs = parsed(tuple(shlex.split(row.theirs)), row.tp_size)
    assert plan_stage(theirs.recompute, 5) == plan_stage(run_of(row).recompute, 5)
    assert theirs.recompute.policy == run_of(row).recompute.policy


@in_one_test("row", ROWS)
def test_the_figure_is_the_predicted_one(row):
    run = run_of(row)
    plan, sizes = plan_stage(run.recompute, run.model.num_layers), Sizes.of(run, device="cpu")
    device, host = (activation_bytes(plan, sizes, on_host=one) for one in (False, True))
    assert row.figure == f"{device:,}" + (f" + {host:,} on the host" if host else "")


@in_one_test("cells", [cells for heading, last, cells in tables() if last == "error"])
def test_what_is_refused_says_why(cells):
    system, config, message = cells
    with pytest.raises(ValueError) as raised:
        size = 1 if system.lower() in PARTITIONING else None
        translated(json.loads(config), system.lower(), size)
    assert str(raised.value) == message


@in_one_test("cells", [row for head, last, row in tables() if (head, last) == HERE])
def test_a_budget_for_the_compiler_is_a_run_without_a_policy(cells):
    words = tuple(shlex.split(cells[1]))
    run = parsed(words, 1)
    assert translated(json.loads(cells[0]), "torchtitan").flags == words
    assert run.training.torch_compile and run.recompute.activation_memory_budget == 0.5
