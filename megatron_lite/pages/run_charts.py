"""The charts of a run: those of the known columns, and one for any other column that changes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace

from megatron_lite.pages.figures import NO_UNIT, MeasureUnit, time_unit
from megatron_lite.pages.line_chart import MOST_POINTS, LineChart, Series
from megatron_lite.pages.markup import shortened
from megatron_lite.pages.run_predictions import (
    MEASURED,
    PREDICTED,
    Prediction,
    predictions,
    times,
    unit_of,
    words_of,
)
from megatron_lite.pages.run_record import RunRecord

LEAST_FOR_MEAN = 50  # iterations from which the loss has a running mean
# Columns with a chart or a figure of their own, or without a meaning as a curve.
KNOWN = (
    *("consumed_samples", "lm_loss", "learning_rate", "grad_norm", "tokens_per_second"),
    *("iteration_ms", "MFU", "HFU", "skipped", "nan"),
)


def charts_of(run: RunRecord) -> list[LineChart]:
    """Returns the charts in the order of the page."""
    charts = [
        _loss_chart(run),
        _chart(run, "learning rate", ["learning_rate"], from_zero=True),
        _chart(run, "gradient norm before clipping", ["grad_norm"], noisy=True),
        _chart(
            run, "tokens per second, all ranks", ["tokens_per_second"], from_zero=True, noisy=True
        ),
        _chart(run, "utilization of the peak FLOP/s", ["MFU", "HFU"], unit=MeasureUnit("%")),
        _time_chart(run),
    ]
    shown = {*KNOWN}
    for prediction in predictions(run):
        if varies(prediction.predicted) or varies(prediction.measured or ()):
            charts.append(_prediction_chart(run, prediction))
    shown |= {name for name in run.columns if name.endswith((PREDICTED, MEASURED))}
    for name, values in run.columns.items():
        if name not in shown and varies(values):
            unit, size = unit_of(name, max(run.finite(name)))
            charts.append(
                LineChart(
                    title=shortened(words_of(name), 60),
                    xs=run.iterations,
                    series=[Series(name=shortened(words_of(name), 60), values=times(values, size))],
                    unit=unit,
                )
            )
    return [chart for chart in charts if chart is not None]


def varies(values: Sequence[float | None]) -> bool:
    """Returns whether a column has at least two different numbers."""
    return len({value for value in values if value is not None}) > 1


def _chart(
    run: RunRecord,
    title: str,
    names: Sequence[str],
    *,
    unit: MeasureUnit = NO_UNIT,
    from_zero: bool = False,
    noisy: bool = False,
) -> LineChart | None:
    found = [name for name in names if name in run.columns]
    series = [
        Series(
            name=name.replace("_", " "),
            values=run.columns[name],
            style="wide" if name != found[-1] else "line",
        )
        for name in found
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
    return LineChart(title="loss", xs=xs, series=series, unit=MeasureUnit("nats/token"))


def _with_mean(name: str, values: Sequence[float | None]) -> list[Series]:
    """Returns a noisy curve as a thin line and its running mean as a thick one."""
    window = max(5, len(values) // 100)
    return [
        Series(name=name, values=values, style="thin"),
        Series(name=f"mean of {window:,} iterations", values=running_mean(values, window)),
    ]


def running_mean(values: Sequence[float | None], window: int) -> list[float | None]:
    """Returns the mean of the last `window` values at each place; None where all are gaps."""
    # With the sums up to each place, a mean is one difference, however long the window is.
    sums = list(itertools.accumulate((value or 0.0 for value in values), initial=0.0))
    counts = list(itertools.accumulate((value is not None for value in values), initial=0))
    means: list[float | None] = []
    for stop in range(1, len(values) + 1):
        start = max(0, stop - window)
        count = counts[stop] - counts[start]
        means.append((sums[stop] - sums[start]) / count if count else None)
    return means


def _time_chart(run: RunRecord) -> LineChart | None:
    milliseconds = run.columns.get("iteration_ms")
    if milliseconds is None:
        return None
    seconds = times(milliseconds, 1e-3)
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
    series = [Series(name="predicted", values=prediction.predicted, style="wide")]
    if prediction.measured:
        series.append(Series(name="measured", values=prediction.measured))
    return LineChart(
        title=f"{shortened(prediction.name, 60)}, predicted and measured",
        xs=run.iterations,
        series=series,
        unit=prediction.unit,
    )
