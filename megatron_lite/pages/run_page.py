"""The page of a run: a summary, charts of its metrics, its events and its settings."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone

from megatron_lite.config.run_settings import changed_settings
from megatron_lite.pages.figures import count, duration, number
from megatron_lite.pages.line_chart import Mark, charts_data
from megatron_lite.pages.markup import Html, card, element, json_element, page, shortened, table
from megatron_lite.pages.run_charts import charts_of, varies
from megatron_lite.pages.run_predictions import (
    prediction_card,
    predictions,
    predictions_table,
    unit_of,
    words_of,
)
from megatron_lite.pages.run_record import RunRecord

PEAK_NOTE = "of rank 0; without a GPU that of the whole process"
MOST_LISTED = 200  # events
MOST_ROWS = 24  # of the table of values
KINDS = {
    "skipped": "skipped update",
    "checkpoint": "checkpoint",
    "restart": "restart",
    "end": "exit",
    "warning": "warning or error",
}


def run_page(run: RunRecord) -> str:
    """Returns the page of a run as an HTML document."""
    charts = {f"chart{place}": chart for place, chart in enumerate(charts_of(run))}
    span = (run.iterations[0], run.iterations[-1])
    kinds = [kind for kind in KINDS if any(mark.kind == kind for mark in run.marks)]
    keys = [
        element("li", element("i", class_=f"key {kind}"), KINDS[kind])
        for kind in kinds
        if kind != "warning"
    ]
    drawn = [mark for mark in run.marks if mark.kind != "warning" and span[0] <= mark.x <= span[1]]
    return page(
        f"Run {run.name}",
        element("h1", f"Run {shortened(run.name, 120)}"),
        element("p", _state(run), class_="soft"),
        _cards(run),
        *(element("p", element("b", "Note: "), notice) for notice in run.notices),
        element("h2", "Curves"),
        element(
            "p",
            "Every curve runs over the iterations. Point at a chart, touch it, or use the arrow "
            "keys in it: each legend shows the values of that iteration. Without that it shows "
            "the last ones.",
            class_="soft",
        ),
        element("ul", *keys, class_="legend") if keys else Html(),
        element(
            "div",
            *(chart.html(name, drawn, span) for name, chart in charts.items()),
            class_="charts",
        ),
        element("p", class_="where", data_where="run", hidden=True),
        json_element(charts_data(charts, drawn, span, "run"), "charts"),
        predictions_table(run),
        _events(run),
        _settings(run),
        _values(run),
        scripts=["page.js"],
    )


def _state(run: RunRecord) -> str:
    last = run.iterations[-1]
    written = datetime.fromtimestamp(run.written, timezone.utc)
    goal = run.num_iterations
    state = "The run has reached its end." if goal is not None and last >= goal else ""
    if goal is not None and last < goal:
        state = f"The run is at iteration {last:,} of {goal:,}."
    return f"{state} Its last row was written at {written:%Y-%m-%d %H:%M} UTC.".strip()


def _cards(run: RunRecord) -> Html:
    losses = run.finite("lm_loss")
    seconds = sum(run.finite("iteration_ms")) / 1000.0
    cards = [card("iterations", f"{run.iterations[-1]:,}", _of_goal(run))]
    tokens = _tokens(run)
    if tokens:
        cards.append(card("tokens", count(tokens)))
    if losses:
        cards.append(card("last loss", number(losses[-1]), "nats per token"))
    for name, series in sorted(run.evaluations.items(), reverse=True):
        if series:
            at = min(series, key=lambda iteration: series[iteration])
            cards.append(card(f"best {name} loss", number(series[at]), f"at iteration {at:,}"))
    if seconds:
        cards.append(card("time in iterations", duration(seconds)))
    speeds = run.finite("tokens_per_second")
    if speeds:
        cards.append(card("tokens per second", number(statistics.median(speeds)), "median"))
    for name in ("MFU", "HFU"):
        if found := run.finite(name):
            cards.append(card(name, f"{number(statistics.median(found))} %", "median"))
    if found := run.finite("peak GiB"):
        unit, size = unit_of("peak GiB", max(found))
        cards.append(card(words_of("peak GiB"), unit.shown(max(found) * size), PEAK_NOTE))
    cards += [prediction_card(prediction) for prediction in predictions(run)]
    if run.axes:
        sizes = ", ".join(
            f"{name.removesuffix('_size').upper()} {size}"
            for name, size in run.axes.items()
            if size > 1
        )
        ranks = 1
        for size in run.axes.values():
            ranks *= size
        cards.append(card("ranks", f"{ranks:,}", sizes))
    kinds = Counter(mark.kind for mark in run.marks)
    for kind in ("skipped", "restart"):
        if kinds[kind]:
            cards.append(card(f"{KINDS[kind]}s", f"{kinds[kind]:,}"))
    return element("ul", *cards, class_="cards")


def _of_goal(run: RunRecord) -> str:
    return f"of {run.num_iterations:,}" if run.num_iterations else ""


def _tokens(run: RunRecord) -> float:
    samples = run.finite("consumed_samples")
    if run.config is not None and samples:
        return samples[-1] * run.config.data.seq_length
    pairs = zip(
        run.columns.get("tokens_per_second", ()), run.columns.get("iteration_ms", ()), strict=False
    )
    return round(sum(speed * ms / 1000.0 for speed, ms in pairs if speed and ms))


def _events(run: RunRecord) -> Html:
    if not run.marks:
        return Html(element("h2", "Events") + element("p", "The files name no event."))
    rows = [
        [f"{mark.x:,}", element("span", element("i", class_=f"key {mark.kind}"), KINDS[mark.kind])]
        + [_details(mark)]
        for mark in _most_important(run.marks)
    ]
    left_out = len(run.marks) - len(rows)
    counts = Counter(mark.kind for mark in run.marks)
    counted = ", ".join(f"{KINDS[kind]}: {counts[kind]:,}" for kind in KINDS if counts[kind])
    more = f" {left_out:,} skipped updates and checkpoints are not listed." if left_out else ""
    return Html(
        element("h2", "Events")
        + table(
            ["iteration", "event", "details"],
            rows,
            caption=f"Events by kind: {counted}.{more}",
            class_="rows",
        )
    )


def _details(mark: Mark) -> str:
    """Returns the text of an event without the words of its kind, which stand beside it."""
    kind = KINDS[mark.kind]
    return "" if mark.text == kind else mark.text.removeprefix(f"{kind}: ")


def _most_important(marks: Sequence[Mark]) -> list[Mark]:
    """Returns at most MOST_LISTED marks in their order; restarts, exits and warnings come first."""
    if len(marks) <= MOST_LISTED:
        return list(marks)
    rare = [mark for mark in marks if mark.kind not in ("skipped", "checkpoint")][-MOST_LISTED:]
    others = [mark for mark in marks if mark.kind in ("skipped", "checkpoint")]
    kept = [*rare, *others[len(others) - (MOST_LISTED - len(rare)) :]]
    return sorted(kept, key=lambda mark: mark.x)


def _settings(run: RunRecord) -> Html:
    if run.config is None:
        return Html()
    rows = [
        [
            element("code", setting.flag),
            shortened(setting.value),
            "no default" if setting.default is None else shortened(setting.default),
            setting.topic.replace("_", " "),
        ]
        for setting in changed_settings(run.config)
    ]
    return Html(
        element("h2", "Settings")
        + table(
            ["setting", "value", "default", "topic"],
            rows,
            caption="The settings of the newest checkpoint that differ from the defaults.",
            class_="short",
        )
    )


def _values(run: RunRecord) -> Html:
    """Returns a table of evenly spread iterations, which says in text what the charts show."""
    count = min(len(run.iterations), MOST_ROWS)
    last = len(run.iterations) - 1
    places = sorted({number_ * last // max(count - 1, 1) for number_ in range(count)})
    names = [
        name for name in run.columns if varies(run.columns[name]) and name not in ("skipped", "nan")
    ]
    rows = [
        [f"{run.iterations[place]:,}"]
        + ["" if (value := run.columns[name][place]) is None else number(value) for name in names]
        for place in places
    ]
    evaluations = [
        [f"{iteration:,}", name, number(loss)]
        for name, series in sorted(run.evaluations.items(), reverse=True)
        for iteration, loss in sorted(series.items())[-MOST_LISTED:]
    ]
    parts = [
        table(
            ["iteration", *(shortened(name.replace("_", " "), 40) for name in names)],
            rows,
            caption=f"{len(rows)} of {len(run.iterations):,} iterations. An empty cell is a value "
            "that is missing, NaN or infinite.",
            class_="figures",
        )
    ]
    if evaluations:
        parts.append(
            table(
                ["iteration", "pass", "loss"],
                evaluations,
                caption="Losses of evaluations.",
                class_="short",
            )
        )
    return element("details", element("summary", "The values as tables"), *parts)
