"""Horizontal stacked bars on one scale, with a line for a capacity and an area for a reserve.

A bar is made of HTML boxes whose widths are shares, so it fits every screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.pages.figures import MeasureUnit
from megatron_lite.pages.markup import Html, element

NUM_COLORS = 10


class Part(NamedTuple):
    """A category of the bars. hint: what a pointer shows about it. color: its number in page.css,
    below NUM_COLORS."""

    name: str
    hint: str
    color: int


class Bar(NamedTuple):
    """One bar: a value for each part, in the unit's base (bytes, seconds)."""

    label: str
    values: Sequence[float]


class Limits(NamedTuple):
    """The end of the scale, the capacity, and the reserve below it."""

    most: float
    capacity: float
    reserve: float = 0.0

    @classmethod
    def over(cls, bars: Sequence[Bar], *, capacity: float, reserve: float = 0.0) -> Limits:
        """Returns limits with room for all bars and for the capacity."""
        longest = max((sum(bar.values) for bar in bars), default=0.0)
        return cls(1.04 * max(longest, capacity), capacity, reserve)


def stacked_bars(
    parts: Sequence[Part], bars: Sequence[Bar], unit: MeasureUnit, limits: Limits | None = None
) -> Html:
    """Returns the bars with a legend. limits: None scales to the longest bar."""
    most = limits.most if limits else max((sum(bar.values) for bar in bars), default=0.0)
    rows = [_bar(parts, bar, unit, most or 1.0, limits) for bar in bars]
    return Html(legend(parts) + element("div", *rows, class_="bars"))


def legend(parts: Sequence[Part]) -> Html:
    """Returns the colours of the parts."""
    entries = [
        element(
            "li",
            element("i", class_=f"swatch box c{part.color}"),
            part.name,
            title=part.hint or None,
        )
        for part in parts
    ]
    return element("ul", *entries, class_="legend")


def _bar(
    parts: Sequence[Part], bar: Bar, unit: MeasureUnit, most: float, limits: Limits | None
) -> Html:
    total = sum(bar.values)
    pieces = [
        element(
            "i",
            class_=f"part c{part.color}",
            style=f"width:{100 * value / most:.3f}%",
            title=f"{part.name}: {unit.shown(value)}. {part.hint}".rstrip(". "),
        )
        for part, value in zip(parts, bar.values, strict=True)
        if value
    ]
    said = ", ".join(
        f"{part.name} {unit.shown(value)}"
        for part, value in zip(parts, bar.values, strict=True)
        if value
    )
    over = limits is not None and total > limits.capacity
    track = element("div", *marks_of(limits), *pieces, class_="track", aria_hidden="true")
    return element(
        "div",
        element("span", bar.label, class_="name"),
        track,
        element("b", unit.shown(total), class_="bad" if over else None),
        class_="bar",
        role="img",
        aria_label=f"{bar.label}: {unit.shown(total)}: {said}",
    )


def marks_of(limits: Limits | None) -> list[Html]:
    """Returns the area of the reserve and the line of the capacity."""
    if limits is None:
        return []
    start = 100 * (limits.capacity - limits.reserve) / limits.most
    width = 100 * limits.reserve / limits.most
    return [
        element(
            "span", class_="reserve", style=f"left:{start:.3f}%;width:{width:.3f}%", title="reserve"
        ),
        element(
            "span",
            class_="capacity",
            style=f"left:{100 * limits.capacity / limits.most:.3f}%",
            title="capacity",
        ),
    ]
