"""The quantities that a run has predicted, beside what it measured.

They are the columns NAME_predicted of the metrics, with NAME_measured or NAME.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from megatron_lite.pages.figures import NO_UNIT, MeasureUnit, byte_unit, time_unit
from megatron_lite.pages.markup import Html, card, element, table
from megatron_lite.pages.run_record import RunRecord

PREDICTED, MEASURED = "_predicted", "_measured"
TITLES = {  # of the columns whose words alone do not say what they are
    "activation_bytes": "kept for backward",
    "peak_bytes": "peak of a step",
    "peak GiB": "peak memory",
}


class Prediction(NamedTuple):
    """A quantity that was predicted and measured. Bytes are in bytes and times in seconds.

    measured: None if the run has not measured it.
    """

    name: str
    predicted: list[float | None]
    measured: list[float | None] | None
    unit: MeasureUnit

    @property
    def last(self) -> tuple[float | None, float | None]:
        """The last predicted and the typical (median) measured value."""
        known = [value for value in self.predicted if value is not None]
        found = [value for value in self.measured or () if value is not None]
        return (known[-1] if known else None), (statistics.median(found) if found else None)


def predictions(run: RunRecord) -> list[Prediction]:
    """Returns the columns NAME_predicted, each with NAME_measured or NAME.

    The figures of the run's summary count as columns with one value.
    """
    found = []
    summary: dict[str, list[float | None]] = {name: [one] for name, one in run.summary.items()}
    columns = {**summary, **run.columns}
    for name, predicted in columns.items():
        base = name.removesuffix(PREDICTED)
        if base == name:
            continue
        measured = columns.get(base + MEASURED, columns.get(base))
        values = [value for value in (*predicted, *(measured or ())) if value is not None]
        if not values:
            continue
        unit, size = unit_of(base, max(values))
        found.append(
            Prediction(words_of(base), times(predicted, size), times(measured, size), unit)
        )
    return found


def times(values: list[float | None] | None, size: float) -> list[float | None]:
    """Returns the values times `size`. Gaps stay gaps, and no column gives none."""
    return [None if value is None else value * size for value in values or ()]


def words_of(name: str) -> str:
    """Returns the words of a column: "iteration_ms" is "iteration time"."""
    if name in TITLES:
        return TITLES[name]
    words = name.split("_")
    return " ".join("time" if word in ("ms", "seconds") else word for word in words)


def unit_of(name: str, most: float) -> tuple[MeasureUnit, float]:
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


def prediction_card(prediction: Prediction) -> Html:
    """Returns the card of a quantity for the summary."""
    predicted, measured = prediction.last
    value = prediction.unit.shown(measured if measured is not None else predicted)
    note = "predicted, not measured"
    if measured is not None:
        note = f"measured; predicted {prediction.unit.shown(predicted)}"
    return card(prediction.name, value, note)


def _percent(share: float) -> str:
    """Returns a difference that is not 0, which never reads as 0."""
    if abs(share) < 0.00005:
        return f"{'+' if share > 0 else '-'} under 0.01 %"
    return f"{100.0 * share:+.2f} %"


def predictions_table(run: RunRecord) -> Html:
    """Returns the table of all quantities; nothing if the run has predicted none."""
    rows = []
    for prediction in predictions(run):
        predicted, measured = prediction.last
        both = predicted is not None and measured is not None
        difference = "not measured"
        if both:
            difference = "equal" if predicted == measured else ""
        if both and predicted != measured and measured:
            difference = _percent(predicted / measured - 1.0)  # type: ignore[operator]
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
