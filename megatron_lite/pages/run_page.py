"""The page of a run: its figures, curves of its metrics, and its events."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from megatron_lite.pages.document import GIB, document, number, picture
from megatron_lite.pages.run_record import COLUMNS, KEPT, RunRecord

PANELS: tuple[tuple[str, float, tuple[str, ...]], ...] = (  # title, size of the unit, what it shows
    ("loss [nats per token]", 1.0, ("lm_loss", "validation", "test")),
    ("gradient norm before clipping", 1.0, ("grad_norm",)),
    ("tokens per second, all ranks", 1.0, ("tokens_per_second",)),
    ("time of an iteration [ms]", 1.0, ("iteration_ms",)),
    ("learning rate", 1.0, ("learning_rate",)),
    ("kept for backward by a micro-batch [GiB]", GIB, KEPT),
)
STYLES = {  # of events on the curves
    "skipped": dict(color="#EE6677", linestyle=":"),
    "restart": dict(color="#AA3377", linestyle="--"),
}
MOST_LISTED, MOST_ROWS = 200, 24


def run_page(run: RunRecord) -> str:
    """Returns the page of a run as an HTML document."""
    iterations, last = list(run.rows), len(run.rows) - 1
    places = sorted({place * last // (MOST_ROWS - 1) for place in range(MOST_ROWS)})
    return document(
        "run.html",
        f"Run {run.name}",
        run.notices,
        written=f"{datetime.fromtimestamp(run.written, timezone.utc):%Y-%m-%d %H:%M}",
        facts=list(_facts(run)),
        curves=picture(run_figure, run),
        events=sorted(run.events)[-MOST_LISTED:],
        num_events=len(run.events),
        names=[name for name in COLUMNS if run.known(name)],
        values={iterations[place]: run.rows[iterations[place]] for place in places},
        evaluations={
            name: dict([*run.points(name).items()][-MOST_LISTED:])
            for name in ("validation", "test")
        },
    )


def _facts(run: RunRecord) -> Iterator[tuple[str, str]]:
    yield "iterations", str(next(reversed(run.rows)))
    if losses := run.known("lm_loss"):
        yield "last loss", number(losses[-1])
    if evaluated := run.logged.get("validation"):
        best = min(evaluated, key=lambda at: evaluated[at])
        yield "best validation loss", f"{number(evaluated[best])} at iteration {best}"
    for name, word in (("tokens_per_second", "tokens per second"), ("iteration_ms", "iteration")):
        if found := run.known(name):
            unit = " ms" if name == "iteration_ms" else ""
            yield f"{word}, median", number(statistics.median(found)) + unit
    figures = {name: values[-1] for name in KEPT if (values := run.known(name))} | run.summary
    for name, value in figures.items():
        words = name.replace("_bytes", "").replace("_", " ")
        if name.endswith(("bytes_predicted", "bytes_measured")):
            yield words, f"{number(value / GIB)} GiB"
        elif name.endswith(("_predicted", "_measured")):
            yield words, number(value)
    for kind in STYLES:
        yield kind, str(sum(found == kind for _, found, _ in run.events))


def run_figure(run: RunRecord) -> Any:
    """Returns the matplotlib figure of the curves. A gap is a value that is no finite number."""
    from matplotlib.figure import Figure

    panels = [
        (title, size, {name: run.points(name) for name in names if run.known(name)})
        for title, size, names in PANELS
        if any(run.known(name) for name in names)
    ]
    rows = max(1, -(-len(panels) // 2))
    figure = Figure(figsize=(11, 2.4 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False).flat
    for axis, (title, size, curves) in zip(axes, panels, strict=False):
        axis.set_title(title)
        for name, points in curves.items():
            ys = [math.nan if value is None else value / size for value in points.values()]
            dots = dict(marker="o", markersize=3) if name in run.logged or len(ys) == 1 else {}
            width = 3 if name in KEPT[:1] else 1  # stays visible below the measured bytes
            axis.plot([*points], ys, linewidth=width, label=name, **dots)
        if len(curves) > 1:
            axis.legend(frameon=False)
        for kind, style in STYLES.items():
            for at in sorted(at for at, found, _ in run.events if found == kind)[-MOST_LISTED:]:
                axis.axvline(at, linewidth=0.8, alpha=0.6, gid=kind, **style)
    return figure
