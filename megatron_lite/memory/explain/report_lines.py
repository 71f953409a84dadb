"""Lines that fit the terminal, and names of layers, for the report of `--explain-recompute`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from megatron_lite.config.host_parts import parts_of
from megatron_lite.memory.explain.prices import region_names
from megatron_lite.memory.explain.recompute_report import LayerRun
from megatron_lite.memory.explain.units import GIB, ByteUnit
from megatron_lite.recompute.recompute_plan import Segment

WIDTH = 100


class Lines(NamedTuple):
    """Makes lines of at most `width` columns. Tables are narrower below the full width."""

    width: int = WIDTH

    @property
    def are_narrow(self) -> bool:
        """Whether the tables have their narrow form, of at most 80 columns."""
        return self.width < WIDTH

    def either(self, wide: int, narrow: int) -> int:
        """Returns the columns of a cell."""
        return narrow if self.are_narrow else wide

    def wrapped(self, text: str, indent: str = "  ", first: str | None = None) -> list[str]:
        """Returns the lines of a paragraph. first: the indent of the first line, if it differs."""
        return textwrap.wrap(
            text,
            self.width,
            initial_indent=indent if first is None else first,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )

    def field(self, name: str, text: str) -> list[str]:
        """Returns the lines of a named fact; those after the first are indented."""
        indent = "    "
        return self.wrapped(text, indent + 12 * " ", first=f"{indent}{name:12}")

    def with_comment(self, row: str, comment: str) -> list[str]:
        """Returns a row and its comment, which stands below it if it does not fit beside it."""
        whole = f"{row}   {comment}".rstrip()
        if len(whole) <= self.width:
            return [whole]
        return [row, *self.wrapped(comment, indent=8 * " ")]


def column_unit(numbers: Iterable[int]) -> ByteUnit:
    """Returns one unit for all numbers of a column, so that they can be compared."""
    return ByteUnit.of(max(numbers), gib_from=10 * GIB)


def run_name(run: LayerRun) -> str:
    """Returns the layers of a run of equal layers, with their stage if there are several."""
    stage = "" if run.stage is None else f"stage {run.stage} "
    return stage + layers_name(run.segment.first_layer, run.last_layer)


def layers_name(first: int, last: int) -> str:
    """Returns the name of the layers from the first to the last."""
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def segment_name(segment: Segment) -> str:
    """Returns what is kept of a layer or unit, in a few words."""
    if segment.host_modules:
        return f"{', '.join(parts_of(segment.store))} on host"
    if segment.on_host:
        return (
            f"{segment_name(replace(segment, store='split' if segment.split else 'device'))}, host"
        )
    if segment.unit:
        return "unit, split" if segment.split else "unit"
    if segment.ops:
        return textwrap.shorten(str(segment.action).replace(",", ", "), 31, placeholder=" ...")
    return "+".join(region_names(segment.regions)) or "everything kept"
