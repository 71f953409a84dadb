"""Lines that fit the terminal, and names of layers, for the report of `--explain-recompute`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_lite.config.regions import parts_of
from megatron_lite.config.units import GIB, ByteUnit
from megatron_lite.memory.explain.layer_groups import LayerGroup
from megatron_lite.memory.explain.prices import region_names
from megatron_lite.recompute.recompute_plan import Segment

WIDTH = 100
MOST_SPANS = 4  # of layers, that a name spells out


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


def group_name(group: LayerGroup) -> str:
    """Returns the layers of a group, with their stages if the model has several."""
    stages = ", ".join(map(str, group.stages))
    place = f" of stage{'s' * (len(group.stages) > 1)} {stages}" if stages else ""
    return layers_name(group.layers) + place


def layers_name(layers: Sequence[int]) -> str:
    """Returns the name of some layers from their numbers in order, such as "layers 0-3, 8".

    Four or fewer spans are all named. More of them at equal distances are named by the first two
    and the last: "layers 0, 2, .. 78".
    """
    spans, texts = _spans(layers), []
    while spans:
        alike = _at_equal_distances(spans)
        named = [f"{one[0]}-{one[-1]}" if len(one) > 1 else f"{one[0]}" for one in spans[:alike]]
        texts += named if alike <= MOST_SPANS else [*named[:2], f".. {named[-1]}"]
        spans = spans[alike:]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(texts)}"


def are_neighbours(layers: Sequence[int]) -> bool:
    """Returns whether layers, given by their numbers in order, have no other layer between them."""
    return len(_spans(layers)) == 1


def _spans(layers: Sequence[int]) -> list[range]:
    """Returns the spans of neighbouring layers."""
    starts = [at for at in range(len(layers)) if not at or layers[at] != layers[at - 1] + 1]
    stops = [*starts[1:], len(layers)]
    return [
        range(layers[start], layers[stop - 1] + 1)
        for start, stop in zip(starts, stops, strict=True)
    ]


def _at_equal_distances(spans: Sequence[range]) -> int:
    """Returns how many of the first spans are equally long and follow at equal distances."""
    if len(spans) == 1:
        return 1
    step = spans[1].start - spans[0].start
    return next(
        (
            number
            for number, span in enumerate(spans)
            if span != range(spans[0].start + number * step, spans[0].stop + number * step)
        ),
        len(spans),
    )


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
