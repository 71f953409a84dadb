"""The grid of a planning page: sliders, memory against time, and the front of the best plans.

plan.js reads the grid (plan/details.py describes it) and draws the bars under the sliders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_lite.pages.figures import AxisRange, number
from megatron_lite.pages.line_chart import ticks
from megatron_lite.pages.markup import Html, element, joined, table
from megatron_lite.pages.plan_terms import MIB, colors_of, hint, seconds_text

SLIDERS = {
    "t": "tensor-parallel size",
    "p": "pipeline-parallel size",
    "states": "data parallelism",
    "b": "micro-batch size",
    "policy": "recomputation",
}


class Dot(NamedTuple):
    """A cell of the grid: the seconds of a step, the peak in MiB, and its place on the axes."""

    seconds: float
    mebibytes: float
    place: list[int]


def grid_data(
    one: Mapping[str, Any], plan: Mapping[str, Any], grid: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what plan.js reads: the grid, the limits in MiB, and the hints of the terms."""
    cells = _summaries(grid)
    scales = _scatter_scales(one, cells)
    colors = colors_of(one["details"], plan)
    return {
        **grid,
        "capacity": one["memory_bytes"] / MIB,
        "reserve": one["reserve_bytes"] / MIB,
        "hints": [hint(name, tag) for name, tag in grid["terms"]],
        "colors": [colors[name] for name, _ in grid["terms"]],
        "x": list(scales[0]),
        "y": list(scales[1]),
    }


def explorer(one: Mapping[str, Any], name: str, grid: Mapping[str, Any]) -> Html:
    """Returns the sliders. plan.js fills the rest of the box. name: the verdict's, on this page."""
    rows = []
    for place, (axis, label) in enumerate(SLIDERS.items()):
        values = grid["axes"][axis]
        identifier = f"{name}-{axis}"
        rows.append(
            element(
                "div",
                element("label", label, for_=identifier),
                element(
                    "input",
                    type="range",
                    id=identifier,
                    min=0,
                    max=len(values) - 1,
                    value=max(grid["plan"][place], 0),
                    data_axis=place,
                    disabled=len(values) == 1,
                ),
                element("output", str(values[max(grid["plan"][place], 0)]), for_=identifier),
                class_="slider",
            )
        )
    return joined(
        [
            element("h2", "Other layouts"),
            element(
                "p",
                f"Move the sliders. {len(grid['cells']):,} plans with the context-parallel size "
                "and the loss chunks of the plan were evaluated. The bars are the ranks that can "
                "be the fullest.",
                class_="soft",
            ),
            element(
                "div",
                element("div", *rows, class_="sliders"),
                element("p", class_="result", role="status"),
                element("ul", class_="legend"),
                element("div", class_="bars"),
                element("noscript", "The sliders need JavaScript. The tables do not."),
                class_="panel explorer",
                data_grid=name,
            ),
        ]
    )


def _summaries(grid: Mapping[str, Any]) -> list[Dot]:
    """Returns the step seconds, the peak in MiB and the place of each cell."""
    return [
        Dot(seconds, max(sum(rank[1:]) for rank in ranks), place)
        for place, seconds, _, ranks in grid["cells"]
    ]


def _scatter_scales(one: Mapping[str, Any], cells: Sequence[Dot]) -> tuple[AxisRange, AxisRange]:
    """Returns the axes: logarithmic seconds, and MiB, without layouts far above the capacity."""
    seconds = [cell.seconds for cell in cells]
    capacity = one["memory_bytes"] / MIB
    peaks = [cell.mebibytes for cell in cells]
    most = min(max(peaks), max(3 * capacity, 2 * min(peaks)))
    return (
        AxisRange(min(seconds) / 1.05, max(seconds) * 1.05, is_log=True),
        AxisRange(0.0, 1.06 * max(most, capacity)),
    )


def scatter(one: Mapping[str, Any], name: str, grid: Mapping[str, Any]) -> Html:
    """Returns the peaks of all cells over their times, and a table of the front."""
    cells = _summaries(grid)
    across, up = _scatter_scales(one, cells)
    capacity = one["memory_bytes"] / MIB
    frontier = pareto(cells)
    chosen = next((cell for cell in cells if cell.place == grid["plan"]), None)
    drawn = {
        "dots over": [cell for cell in cells if cell.mebibytes > capacity],
        "dots under": [cell for cell in cells if cell.mebibytes <= capacity],
        "dots front": frontier,
    }
    paths = [
        element("path", d=_line_at(up, capacity), class_="capacity-line"),
        element("path", d=_steps(frontier, across, up), class_="front-line"),
        *(
            element("path", d=_dots(points, across, up), class_=style)
            for style, points in drawn.items()
        ),
    ]
    if chosen is not None:
        paths.append(element("path", d=_dots([chosen], across, up), class_="dots chosen"))
    beyond = sum(cell.mebibytes > up.high for cell in cells)
    above = (
        f" {beyond} plans with more than {number(up.high / 1024)} GiB are not drawn."
        if beyond
        else ""
    )
    best = min(cells)
    num_fitting = sum(cell.mebibytes <= capacity for cell in cells)
    said = (
        f"{len(cells)} plans, {num_fitting} of which fit into "
        f"{number(capacity / 1024)} GiB. The fastest takes {seconds_text(best.seconds)} a step and "
        f"{number(best.mebibytes / 1024)} GiB."
    )
    keys = [
        ("front", "no other plan is both faster and smaller"),
        ("under", "fits into the card"),
        ("over", "does not fit"),
        ("chosen", "the plan"),
    ]
    return joined(
        [
            element("h2", "Memory against time"),
            element(
                "figure",
                element(
                    "figcaption",
                    element("h3", "peak", element("small", " [GiB] over the time of a step [s]")),
                    element("p", said + above, class_="note"),
                    element(
                        "ul",
                        *(
                            element("li", element("i", class_=f"swatch dots {key}"), text)
                            for key, text in keys
                        ),
                        class_="legend",
                    ),
                ),
                element(
                    "div",
                    element(
                        "svg",
                        *paths,
                        viewBox="0 0 1000 1000",
                        preserveAspectRatio="none",
                        aria_hidden="true",
                    ),
                    *ticks(AxisRange(up.low / 1024, up.high / 1024), "y"),
                    *ticks(across, "x"),
                    class_="plot tall",
                    role="img",
                    tabindex="0",
                    aria_label=said,
                    data_scatter=name,
                ),
                element("p", "Point at a dot to see its layout.", class_="note", data_point=name),
                class_="chart",
            ),
            _pareto_table(grid, frontier),
        ]
    )


def pareto(cells: Sequence[Dot]) -> list[Dot]:
    """Returns the cells than which no other is both faster and smaller, the fastest first."""
    found: list[Dot] = []
    for cell in sorted(cells, key=lambda cell: cell[:2]):
        if not found or cell.mebibytes < found[-1].mebibytes:
            found.append(cell)
    return found


def _pareto_table(grid: Mapping[str, Any], frontier: Sequence[Dot]) -> Html:
    rows = [
        [f"{seconds:,.2f}", f"{mebibytes / 1024:,.2f}"]
        + [str(grid["axes"][axis][index]) for axis, index in zip(SLIDERS, place, strict=True)]
        for seconds, mebibytes, place in frontier
    ]
    return element(
        "details",
        element("summary", f"The {len(rows)} plans on the front"),
        table(
            ["step s", "peak GiB", *SLIDERS],
            rows,
            caption="No other plan of the grid is both faster and smaller.",
            class_="short",
        ),
    )


def _at(across: AxisRange, up: AxisRange, cell: Dot) -> str:
    return f"{1000 * across.place(cell.seconds):.1f} {1000 * (1 - up.place(cell.mebibytes)):.1f}"


def _dots(cells: Sequence[Dot], across: AxisRange, up: AxisRange) -> str:
    return "".join(f"M{_at(across, up, cell)}h0" for cell in cells if cell.mebibytes <= up.high)


def _line_at(up: AxisRange, value: float) -> str:
    return f"M0 {1000 * (1 - up.place(value)):.1f}H1000"


def _steps(frontier: Sequence[Dot], across: AxisRange, up: AxisRange) -> str:
    """Returns the path of the front.

    Between two points it stays at the higher memory until the time of the slower plan.
    """
    parts: list[str] = []
    for cell in frontier:
        if cell.mebibytes > up.high:
            continue
        x, y = _at(across, up, cell).split()
        parts.append(f"H{x}V{y}" if parts else f"M{x} {y}")
    return "".join(parts)
