"""The memory of a plan's fullest rank over the actions of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lite.pages.figures import byte_unit
from megatron_lite.pages.line_chart import LineChart, Mark, Series, charts_data
from megatron_lite.pages.markup import Html, element, joined, table
from megatron_lite.pages.plan_terms import STATES


def timeline_chart(
    one: Mapping[str, Any],
    plan: Mapping[str, Any],
    timeline: Mapping[str, Any],
    name: str,
    charts: dict[str, Any],
) -> Html:
    """Returns the chart of the fullest rank's memory, and adds its points to `charts`."""
    states = sum(term["bytes"] for term in plan["peak_terms"] if term["name"] in STATES)
    kept = [states + num_bytes for num_bytes in timeline["kept_bytes"]]
    xs = range(1, len(kept) + 1)
    unit = byte_unit(max(*kept, one["memory_bytes"]))
    chart = LineChart(
        title=f"memory of pipeline rank {timeline['rank']}",
        xs=xs,
        series=[
            Series(name="held after the action", values=kept),
            Series(name="weights, gradients and states", values=[states] * len(kept)),
            Series(name="predicted peak", values=[plan["peak_bytes"]] * len(kept)),
            Series(name="capacity", values=[one["memory_bytes"]] * len(kept)),
        ],
        unit=unit,
        from_zero=True,
        axis="action",
    )
    marks = [
        Mark(x=x, kind="action", text=f"{action}, micro-batches in flight: {count}")
        for x, action, count in zip(xs, timeline["actions"], timeline["in_flight"], strict=True)
    ]
    span = (1, max(len(kept), 2))
    data = charts_data({f"{name}-timeline": chart}, marks, span, name)
    charts["charts"] |= data["charts"]
    charts["marks"] |= data["marks"]
    shorter = (
        f" The chart has {timeline['drawn']} of the step's {timeline['num_microbatches']} "
        "micro-batches, since the middle of a schedule repeats itself."
        if timeline["drawn"] < timeline["num_microbatches"]
        else ""
    )
    rows = [[str(mark.x), mark.text, unit.shown(kept[mark.x - 1])] for mark in marks[:200]]
    return joined(
        [
            element("h2", "The fullest rank over a step"),
            element(
                "p",
                "Each action is the forward (F) or backward (B) of a micro-batch. The curve is "
                "what the rank holds when the action has ended; the peak is inside a backward."
                + shorter,
                class_="soft",
            ),
            element("div", chart.html(f"{name}-timeline", [], span), class_="charts one"),
            element("p", class_="where", data_where=name, hidden=True),
            element(
                "details",
                element("summary", "The actions as a table"),
                table(
                    ["number", "action", "held"],
                    rows,
                    caption="The actions of the chart.",
                    class_="short",
                ),
            ),
        ]
    )
