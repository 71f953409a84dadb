"""Line charts. The curves are SVG; all text is HTML, so it has the same size on every screen.

The SVG has a 1000 x 1000 coordinate system that is stretched to the plot. Strokes do not scale.
The legend shows the last value of each curve, and page.js shows the value under the pointer there.
A long curve is thinned so that every extreme value stays visible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.pages.figures import NO_UNIT, AxisRange, MeasureUnit
from megatron_lite.pages.markup import Html, element

MOST_POINTS = 420  # of one chart
MOST_MARKS = 300  # of one kind
SIZE = 1000
# From where to where a mark reaches in the plot; other kinds reach from the bottom to the top.
MARK_SPANS = {"skipped": (SIZE, SIZE - 60), "checkpoint": (SIZE, SIZE - 60), "end": (60, 0)}


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. values: as many as the chart has x values; None is a gap.

    style: "line", "thin" (a noisy curve behind its mean), "wide" (a curve that another one may
        cover: it stays visible on both sides) or "dots" (single points).
    """

    name: str
    values: Sequence[float | None]
    style: str = "line"


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened at `x`. kind: a style of page.css, such as "skipped"."""

    x: int
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """A chart of one or more series over the same whole numbers.

    title: the quantity. note: what a reader should know about it, or "".
    from_zero: the axis starts at 0. axis: what the x values count.
    """

    title: str
    xs: Sequence[int]
    series: Sequence[Series]
    unit: MeasureUnit = NO_UNIT
    note: str = ""
    from_zero: bool = False
    axis: str = "iteration"

    def scale(self) -> AxisRange:
        """Returns the vertical axis."""
        found = [
            value / self.unit.size
            for series in self.series
            for value in series.values
            if value is not None
        ]
        return AxisRange.around(found, from_zero=self.from_zero)

    def html(self, identifier: str, marks: Sequence[Mark], span: tuple[int, int]) -> Html:
        """Returns the chart as a figure. span: the first and the last x value of the axis."""
        scale, thinned = self.scale(), self.thinned()
        across = AxisRange(span[0], span[1] if span[1] > span[0] else span[0] + 1)
        described = f"{self.title}: " + "; ".join(map(self._described, self.series))
        axis = ", logarithmic" if scale.is_log else ""
        unit = f" [{self.unit.name}]" if self.unit.name else ""
        return element(
            "figure",
            element(
                "figcaption",
                element("h3", self.title, element("small", f"{unit}{axis}")),
                element("p", self.note, class_="note") if self.note else "",
                self._legend(),
            ),
            element(
                "div",
                self._drawing(thinned, scale, across, marks),
                *ticks(scale, "y"),
                *ticks(across, "x", whole=True),
                class_="plot",
                role="img",
                tabindex="0",
                aria_label=described,
                data_chart=identifier,
            ),
            class_="chart",
        )

    def data(self, span: tuple[int, int]) -> dict[str, Any]:
        """Returns the points that page.js reads: values in the chart's unit."""
        xs, columns = self.thinned()
        scale = self.scale()
        return {
            "span": span,
            "axis": self.axis,
            "x": xs,
            "y": [[_rounded(value) for value in column] for column in columns],
            "dots": [series.style == "dots" for series in self.series],
            "low": scale.low,
            "high": scale.high,
            "log": scale.is_log,
            "unit": self.unit.name,
        }

    def thinned(self) -> tuple[list[int], list[list[float | None]]]:
        """Returns at most MOST_POINTS x values, and the values of each series there.

        The x values are cut into stretches of equal length. Of each stretch and each series the
        smallest and the largest value stay. So do all single points of a series of dots.
        """
        kept = _kept_places([series.values for series in self.series], len(self.xs), MOST_POINTS)
        for series in self.series:
            if series.style == "dots":
                kept |= set(_spread([i for i, v in enumerate(series.values) if v is not None]))
        places = sorted(kept)
        size = self.unit.size
        return [self.xs[place] for place in places], [
            [None if (value := series.values[place]) is None else value / size for place in places]
            for series in self.series
        ]

    def _legend(self) -> Html:
        entries = []
        for place, series in enumerate(self.series):
            last = next((value for value in reversed(series.values) if value is not None), None)
            entries.append(
                element(
                    "li",
                    element("i", class_=f"swatch s{place} {series.style}"),
                    element("span", series.name),
                    element("b", self.unit.shown(last), data_value=place),
                )
            )
        return element("ul", *entries, class_="legend")

    def _described(self, series: Series) -> str:
        pairs = [
            (value, x) for x, value in zip(self.xs, series.values, strict=True) if value is not None
        ]
        if not pairs:
            return f"{series.name} has no finite value"
        (least, at_least), (most, at_most) = min(pairs), max(pairs)
        show: Callable[[float], str] = self.unit.shown
        return (
            f"{series.name} from {show(pairs[0][0])} at {self.axis} {pairs[0][1]} to "
            f"{show(pairs[-1][0])} at {pairs[-1][1]}, least {show(least)} at {at_least}, most "
            f"{show(most)} at {at_most}"
        )

    def _drawing(
        self,
        thinned: tuple[list[int], list[list[float | None]]],
        scale: AxisRange,
        across: AxisRange,
        marks: Sequence[Mark],
    ) -> Html:
        xs, columns = thinned
        lines = [
            element("path", d=f"M0 {_y(scale, value)}H{SIZE}", class_="grid")
            for value in scale.ticks()
        ]
        by_kind: dict[str, list[int]] = {}
        for mark in marks:
            by_kind.setdefault(mark.kind, []).append(mark.x)
        for kind, places in by_kind.items():
            low, high = MARK_SPANS.get(kind, (SIZE, 0))
            path = "".join(f"M{_x(across, x)} {low}V{high}" for x in _spread(places, MOST_MARKS))
            lines.append(element("path", d=path, class_=f"mark {kind}"))
        for place, (series, values) in enumerate(zip(self.series, columns, strict=True)):
            dots = series.style == "dots"
            lines.append(
                element(
                    "path",
                    d=_path(xs, values, scale, across, dots=dots),
                    class_=f"curve s{place} {series.style}",
                )
            )
        return element(
            "svg",
            *lines,
            viewBox=f"0 0 {SIZE} {SIZE}",
            preserveAspectRatio="none",
            aria_hidden="true",
        )


def charts_data(
    charts: Mapping[str, LineChart], marks: Sequence[Mark], span: tuple[int, int], group: str
) -> dict[str, Any]:
    """Returns the data of charts that share a cursor, by identifier, and the texts of their marks.

    A page may join the data of several groups. page.js writes the texts at the cursor into the
    element with data-where="GROUP".
    """
    return {
        "charts": {
            identifier: {**chart.data(span), "group": group} for identifier, chart in charts.items()
        },
        "marks": {group: [[mark.x, mark.text] for mark in marks[:MOST_MARKS]]},
    }


def _kept_places(columns: Sequence[Sequence[float | None]], length: int, most: int) -> set[int]:
    if length <= most:
        return set(range(length))
    # The two ends, and the smallest and the largest value of each column in each stretch.
    num_stretches = max(1, (most - 2) // (2 * len(columns)))
    kept = {0, length - 1}
    for number_ in range(num_stretches):
        start = number_ * length // num_stretches
        stop = (number_ + 1) * length // num_stretches
        for column in columns:
            present = [place for place in range(start, stop) if column[place] is not None]
            if present:
                kept.add(min(present, key=column.__getitem__))  # type: ignore[arg-type]
                kept.add(max(present, key=column.__getitem__))  # type: ignore[arg-type]
            if len(present) < stop - start:  # keeps the gap
                kept.add(next(place for place in range(start, stop) if column[place] is None))
    return kept


def _spread(places: Sequence[int], most: int = 100) -> Sequence[int]:
    """Returns at most `most` of the places, evenly spread, and always the first and the last."""
    if len(places) <= most:
        return places
    return [places[number_ * (len(places) - 1) // (most - 1)] for number_ in range(most)]


def _path(
    xs: Sequence[int],
    values: Sequence[float | None],
    scale: AxisRange,
    across: AxisRange,
    *,
    dots: bool,
) -> str:
    """Returns the commands of an SVG path.

    A value without neighbours, and every value of `dots`, is a line of length 0, which a round cap
    draws as a dot.
    """
    parts, pen_down = [], False
    for place, (x, value) in enumerate(zip(xs, values, strict=True)):
        if value is None:
            pen_down = False
            continue
        at = f"{_x(across, x)} {_y(scale, value)}"
        follows = place + 1 < len(values) and values[place + 1] is not None
        if pen_down:
            parts.append(f"L{at}")
        else:
            parts.append(f"M{at}" if follows and not dots else f"M{at}h0")
        pen_down = not dots
    return "".join(parts)


def _x(across: AxisRange, x: float) -> str:
    return f"{SIZE * across.place(x):.5g}"


def _y(scale: AxisRange, value: float) -> str:
    return f"{SIZE * (1 - scale.place(value)):.4g}"


def ticks(scale: AxisRange, axis: str, *, whole: bool = False) -> list[Html]:
    """Returns the numbers beside the ticks of an axis, "x" or "y", of a plot.

    whole: leaves out those that are no whole numbers.
    """
    side, found = "bottom" if axis == "y" else "left", []
    for value, text in scale.labels():
        if whole and value != int(value):
            continue
        at_end = axis == "x" and scale.place(value) > 0.95
        found.append(
            element(
                "span",
                text,
                class_=f"{axis}tick end" if at_end else f"{axis}tick",
                style=f"{side}:{100 * scale.place(value):.2f}%",
                aria_hidden="true",
            )
        )
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
