"""Wrapped lines and names of layers for the report of `--explain-recompute`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron_lite.config.host_parts import parts_of
from megatron_lite.memory.explain.prices import region_names
from megatron_lite.memory.explain.recompute_report import LayerRun
from megatron_lite.memory.explain.units import GIB, ByteUnit
from megatron_lite.recompute.recompute_plan import Segment

WIDTH = 100


def field(name: str, text: str) -> Iterator[str]:
    """Yields the lines of a named fact; those after the first are indented."""
    indent = "    "
    yield from textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{indent}{name:12}",
        subsequent_indent=indent + 12 * " ",
        break_on_hyphens=False,
    )


def wrapped(text: str, indent: str = "  ") -> list[str]:
    """Returns the lines of a paragraph."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


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
