"""The page of a run: a summary, charts of its metrics, its events and its settings."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import NamedTuple

from megatron_lite.pages.figures import NO_UNIT, Unit, byte_unit, count, duration, number, time_unit
from megatron_lite.pages.line_chart import MOST_POINTS, LineChart, Mark, Series, charts_data
from megatron_lite.pages.markup import Html, element, json_element, page, shortened, table
from megatron_lite.pages.run_record import RunRecord
from megatron_lite.pages.run_settings import changed_settings

MOST_LISTED = 200  # events
MOST_ROWS = 24  # of the table of values
LEAST_FOR_MEAN = 50  # iterations from which the loss has a running mean
PREDICTED, MEASURED = "_predicted", "_measured"
# Columns with a chart or a figure of their own, or without a meaning as a curve.
KNOWN = (
    *("consumed_samples", "lm_loss", "learning_rate", "grad_norm", "tokens_per_second"),
    *("iteration_ms", "MFU", "HFU", "skipped", "nan"),
)
KINDS = {
    "skipped": "skipped update",
    "checkpoint": "checkpoint",
    "restart": "restart",
    "end": "exit",
    "warning": "warning or error",
}


class Prediction(NamedTuple):
    """A quantity that was predicted and measured. Bytes are in bytes and times in seconds.

    measured: None if the run has not measured it.
    """

    name: str
    predicted: list[float | None]
    measured: list[float | None] | None
    unit: Unit

    @property
    def last(self) -> tuple[float | None, float | None]:
        """The last predicted and the typical (median) measured value."""
        known = [value for value in self.predicted if value is not None]
        found = [value for value in self.measured or () if value is not None]
        return (known[-1] if known else None), (statistics.median(found) if found else None)


def run_page(run: RunRecord) -> str:
    """Returns the page of a run as an HTML document."""
    charts = {f"chart{place}": chart for place, chart in enumerate(_charts(run))}
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
            "Point at a chart, touch it, or use the arrow keys in it: each legend shows the values "
            "of that iteration. Without that it shows the last ones.",
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
        _predictions_table(run),
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
    cards = [_card("iterations", f"{run.iterations[-1]:,}", _of_goal(run))]
    tokens = _tokens(run)
    if tokens:
        cards.append(_card("tokens", count(tokens)))
    if losses:
        cards.append(_card("last loss", number(losses[-1]), "nats per token"))
    for name, series in sorted(run.evaluations.items(), reverse=True):
        if series:
            at = min(series, key=lambda iteration: series[iteration])
            cards.append(_card(f"best {name} loss", number(series[at]), f"at iteration {at:,}"))
    if seconds:
        cards.append(_card("time in iterations", duration(seconds)))
    speeds = run.finite("tokens_per_second")
    if speeds:
        cards.append(_card("tokens per second", number(statistics.median(speeds)), "median"))
    for name in ("MFU", "HFU"):
        if found := run.finite(name):
            cards.append(_card(name, f"{number(statistics.median(found))} %", "median"))
    if found := run.finite("peak GiB"):
        cards.append(_card("peak memory", f"{number(max(found))} GiB", "of rank 0"))
    cards += [_prediction_card(prediction) for prediction in _predictions(run)]
    if run.axes:
        sizes = ", ".join(
            f"{name.removesuffix('_size').upper()} {size}"
            for name, size in run.axes.items()
            if size > 1
        )
        ranks = 1
        for size in run.axes.values():
            ranks *= size
        cards.append(_card("ranks", f"{ranks:,}", sizes))
    kinds = Counter(mark.kind for mark in run.marks)
    for kind in ("skipped", "restart"):
        if kinds[kind]:
            cards.append(_card(f"{KINDS[kind]}s", f"{kinds[kind]:,}"))
    return element("ul", *cards, class_="cards")


def _card(name: str, value: str, note: str = "") -> Html:
    return element(
        "li", element("span", name), element("b", value), element("small", note) if note else ""
    )


def _prediction_card(prediction: Prediction) -> Html:
    predicted, measured = prediction.last
    value = prediction.unit.shown(measured if measured is not None else predicted)
    note = "predicted, not measured"
    if measured is not None:
        note = f"measured; predicted {prediction.unit.shown(predicted)}"
    return _card(prediction.name, value, note)


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


def _predictions(run: RunRecord) -> list[Prediction]:
    """Returns the columns NAME_predicted, each with NAME_measured or NAME."""
    found = []
    for name, predicted in run.columns.items():
        base = name.removesuffix(PREDICTED)
        if base == name:
            continue
        measured = run.columns.get(base + MEASURED, run.columns.get(base))
        values = [*run.finite(name), *(value for value in measured or () if value is not None)]
        unit, size = _unit(base, max(values))
        found.append(
            Prediction(_words(base), _times(predicted, size), _times(measured, size), unit)
        )
    return found


def _times(values: list[float | None] | None, size: float) -> list[float | None]:
    return [None if value is None else value * size for value in values or ()]


def _words(name: str) -> str:
    """Returns the words of a column: "iteration_ms" is "iteration time"."""
    words = name.split("_")
    return " ".join("time" if word in ("ms", "seconds") else word for word in words)


def _unit(name: str, most: float) -> tuple[Unit, float]:
    """Returns the unit to show a column in, and the factor that makes bytes or seconds of it."""
    words = name.split("_")
    if "bytes" in words:
        return byte_unit(most), 1.0
    if "gib" in words or "GiB" in name.split():
        return byte_unit(most * 2**30), float(2**30)
    if "ms" in words:
        return time_unit(most / 1000.0), 1e-3
    if "seconds" in words and "per" not in words:
        return time_unit(most), 1.0
    return NO_UNIT, 1.0


def _charts(run: RunRecord) -> list[LineChart]:
    charts = [
        _loss_chart(run),
        _chart(run, "learning rate", ["learning_rate"], from_zero=True),
        _chart(run, "gradient norm before clipping", ["grad_norm"], noisy=True),
        _chart(
            run, "tokens per second, all ranks", ["tokens_per_second"], from_zero=True, noisy=True
        ),
        _chart(run, "utilization of the peak FLOP/s", ["MFU", "HFU"], unit=Unit("%")),
        _time_chart(run),
    ]
    shown = {*KNOWN}
    for prediction in _predictions(run):
        if _varies(prediction.predicted) or _varies(prediction.measured or ()):
            charts.append(_prediction_chart(run, prediction))
    shown |= {name for name in run.columns if name.endswith((PREDICTED, MEASURED))}
    for name, values in run.columns.items():
        if name not in shown and _varies(values):
            unit, size = _unit(name, max(run.finite(name)))
            charts.append(
                LineChart(
                    title=shortened(_words(name), 60),
                    xs=run.iterations,
                    series=[Series(name=shortened(_words(name), 60), values=_times(values, size))],
                    unit=unit,
                )
            )
    return [chart for chart in charts if chart is not None]


def _varies(values: Sequence[float | None]) -> bool:
    return len({value for value in values if value is not None}) > 1


def _chart(
    run: RunRecord,
    title: str,
    names: Sequence[str],
    *,
    unit: Unit = NO_UNIT,
    from_zero: bool = False,
    noisy: bool = False,
) -> LineChart | None:
    series = [
        Series(name=name.replace("_", " "), values=run.columns[name])
        for name in names
        if name in run.columns
    ]
    if not series:
        return None
    if noisy and len(run.iterations) > MOST_POINTS:
        series = _with_mean(series[0].name, series[0].values)
    return LineChart(title=title, xs=run.iterations, series=series, unit=unit, from_zero=from_zero)


def _loss_chart(run: RunRecord) -> LineChart | None:
    """Returns the chart of the loss, its running mean and the evaluations.

    An evaluation may be at an iteration that has no row; the chart has a place for it too.
    """
    losses = run.columns.get("lm_loss")
    if losses is None:
        return None
    evaluated = {iteration for series in run.evaluations.values() for iteration in series}
    xs = sorted({*run.iterations, *evaluated})
    own = [Series(name="lm loss", values=losses)]
    if len(losses) >= LEAST_FOR_MEAN:
        own = _with_mean("lm loss", losses)
    places = {iteration: place for place, iteration in enumerate(run.iterations)}
    series = [
        replace(one, values=[one.values[places[x]] if x in places else None for x in xs])
        for one in own
    ]
    for name, points in sorted(run.evaluations.items(), reverse=True):
        values = [points.get(x) for x in xs]
        series.append(Series(name=f"{name} loss", values=values, style="dots"))
    return LineChart(title="loss", xs=xs, series=series, unit=Unit("nats/token"))


def _with_mean(name: str, values: Sequence[float | None]) -> list[Series]:
    """Returns a noisy curve as a thin line and its running mean as a thick one."""
    window = max(5, len(values) // 100)
    return [
        Series(name=name, values=values, style="thin"),
        Series(name=f"mean of {window:,} iterations", values=_running_mean(values, window)),
    ]


def _running_mean(values: Sequence[float | None], window: int) -> list[float | None]:
    """Returns the mean of the last `window` values at each place; None where all are gaps."""
    sums = list(itertools.accumulate((value or 0.0 for value in values), initial=0.0))
    counts = list(itertools.accumulate((value is not None for value in values), initial=0))
    means: list[float | None] = []
    for stop in range(1, len(values) + 1):
        start = max(0, stop - window)
        count = counts[stop] - counts[start]
        means.append((sums[stop] - sums[start]) / count if count else None)
    return means


def _time_chart(run: RunRecord) -> LineChart | None:
    times = run.columns.get("iteration_ms")
    if times is None:
        return None
    seconds = _times(times, 1e-3)
    unit = time_unit(statistics.median([value for value in seconds if value is not None] or [0.0]))
    return LineChart(
        title="time of an iteration",
        xs=run.iterations,
        series=_with_mean("time", seconds)
        if len(seconds) > MOST_POINTS
        else [Series(name="time", values=seconds)],
        unit=unit,
    )


def _prediction_chart(run: RunRecord, prediction: Prediction) -> LineChart:
    series = [Series(name="predicted", values=prediction.predicted)]
    if prediction.measured:
        series.append(Series(name="measured", values=prediction.measured))
    return LineChart(
        title=f"{shortened(prediction.name, 60)}, predicted and measured",
        xs=run.iterations,
        series=series,
        unit=prediction.unit,
    )


def _predictions_table(run: RunRecord) -> Html:
    rows = []
    for prediction in _predictions(run):
        predicted, measured = prediction.last
        both = predicted is not None and measured is not None
        difference = "not measured"
        if both:
            difference = "equal" if predicted == measured else ""
        if both and predicted != measured and measured:
            difference = f"{100.0 * (predicted / measured - 1.0):+.2f} %"  # type: ignore[operator]
        rows.append(
            [
                prediction.name,
                prediction.unit.shown(predicted),
                prediction.unit.shown(measured),
                difference,
            ]
        )
    if not rows:
        return Html()
    return Html(
        element("h2", "Predicted and measured")
        + table(
            ["quantity", "predicted", "measured", "difference"],
            rows,
            caption="The last prediction, the median of the measured values, and how far the "
            "prediction is above (+) or below (-) it.",
            class_="figures",
        )
    )


def _events(run: RunRecord) -> Html:
    if not run.marks:
        return Html(element("h2", "Events") + element("p", "The files name no event."))
    rows = [
        [f"{mark.x:,}", element("span", element("i", class_=f"key {mark.kind}"), KINDS[mark.kind])]
        + [mark.text]
        for mark in _most_important(run.marks)
    ]
    left_out = len(run.marks) - len(rows)
    counts = Counter(mark.kind for mark in run.marks)
    counted = ", ".join(f"{KINDS[kind]}: {counts[kind]:,}" for kind in KINDS if counts[kind])
    more = f" {left_out:,} skipped updates and checkpoints are not listed." if left_out else ""
    return Html(
        element("h2", "Events")
        + table(
            ["iteration", "event", "details"], rows, caption=f"Events by kind: {counted}.{more}"
        )
    )


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
        )
    )


def _values(run: RunRecord) -> Html:
    """Returns a table of evenly spread iterations, which says in text what the charts show."""
    count = min(len(run.iterations), MOST_ROWS)
    last = len(run.iterations) - 1
    places = sorted({number_ * last // max(count - 1, 1) for number_ in range(count)})
    names = [
        name
        for name in run.columns
        if _varies(run.columns[name]) and name not in ("skipped", "nan")
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
            table(["iteration", "pass", "loss"], evaluations, caption="Losses of evaluations.")
        )
    return element("details", element("summary", "The values as tables"), *parts)
