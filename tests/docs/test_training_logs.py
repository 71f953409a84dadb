"""The names and numbers of docs/training-logs.md. Its row is generated (tests/docs/figures.py)."""

from __future__ import annotations

from pathlib import Path

from megatron_lite.parallel.messages import FIRST_AFTER_S, GROWTH
from megatron_lite.training.iteration_line import PEAK_OF
from megatron_lite.training.log import HEADING_EVERY

PAGE = (Path(__file__).parents[2] / "docs" / "training-logs.md").read_text()


def test_the_names_and_numbers_of_the_page_are_those_of_the_code() -> None:
    assert all(f"`peak GiB {what}`" in PAGE for what in PEAK_OF.values())
    assert f"repeated every {HEADING_EVERY} rows" in PAGE
    assert (FIRST_AFTER_S, GROWTH) == (5.0, 3.0), "the page says five, 15 and 45 seconds"
