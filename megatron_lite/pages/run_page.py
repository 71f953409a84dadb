"""The page of a run: its figures, curves of its metrics, and its events."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from megatron_lite.pages.document import Section, Table, document, number, picture
from megatron_lite.pages.run_record import KEPT, RunRecord

GIB = 2**30
PANELS: tuple[tuple[str, float, tuple[str, ...]], ...] = (  # title, size of the unit, what it shows
    ("loss [nats per token]", 1.0, ("lm_loss", "validation", "test")),
    ("gradient norm before clipping", 1.0, ("grad_norm",)),
    ("tokens per second, all ranks", 1.0, ("tokens_per_second",)),
    ("time of an iteration [ms]", 1.0, ("iteration_ms",)),
    ("utilization of the peak [%]", 1.0, ("MFU", "HFU")),
    ("learning rate", 1.0, ("learning_rate",)),
    ("kept for backward by a micro-batch [GiB]", GIB, KEPT),
    ("peak memory of rank 0 [GiB]", 1.0, ("peak GiB",)),
)
STYLES = {  # of events on the curves
    "skipped": dict(color="#EE6677", linestyle=":"),
    "restart": dict(color="#AA3377", linestyle="--"),
    "stop": dict(color="#333333", linestyle="-"),
}
MOST_LISTED, MOST_ROWS = 200, 24


def run_page(run: RunRecord) -> str:
    """Returns the page of a run as an HTML document."""
    written = datetime.fromtimestamp(run.written, timezone.utc)
    events = sorted(run.events)
    shown = [one for one in events if one[1] != "checkpoint"][-MOST_LISTED:]
    shown += [one for one in events if one[1] == "checkpoint"][len(shown) - MOST_LISTED :]
    last = len(run.iterations) - 1
    places = sorted({place * last // (MOST_ROWS - 1) for place in range(MOST_ROWS)})
    names = [name for name in run.columns if run.known(name)]
    values = [
        [str(run.iterations[at]), *(number(run.columns[name][at]) for name in names)]
        for at in places
    ]
    evaluations = [
        [str(at), name, number(loss)]
        for name in ("validation", "test")
        for at, loss in [*run.points(name).items()][-MOST_LISTED:]
    ]
    return document(
        f"Run {run.name}",
        [
            Section(
                "Figures",
                f"The last row was written at {written:%Y-%m-%d %H:%M} UTC.",
                facts=list(_facts(run)),
            ),
            Section(
                "Curves over the iterations",
                "Dotted lines are skipped updates, dashed ones restarts, whole ones stops.",
                picture=picture(run_figure, run),
            ),
            Section(
                "Events",
                f"{len(events)} events; {len(shown)} of them are listed.",
                tables=[
                    Table(
                        "What happened, by iteration",
                        ("iteration", "event", "details"),
                        [(str(at), kind, text) for at, kind, text in sorted(shown)],
                    )
                ],
            ),
            Section(
                "Values",
                tables=[
                    Table(
                        f"{len(values)} of {last + 1} iterations; an empty cell is NaN or infinite",
                        ["iteration", *names],
                        values,
                    ),
                    Table("Evaluations", ("iteration", "pass", "loss"), evaluations),
                ],
            ),
        ],
        run.notices,
    )


def _facts(run: RunRecord) -> Iterator[tuple[str, str]]:
    goal = f" of {run.num_iterations}" if run.num_iterations else ""
    yield "iterations", f"{run.iterations[-1]}{goal}"
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
        if name.endswith(("_predicted", "_measured")):
            words, unit = name.replace("_", " "), ""
            if "bytes" in name:
                words, unit, value = words.replace("bytes ", ""), " GiB", value / GIB
            yield words, number(value) + unit
    for kind in STYLES:
        yield kind, str(sum(found == kind for _, found, _ in run.events))


def run_figure(run: RunRecord) -> Any:
    """Returns the matplotlib figure of the curves. A gap is a value that is no finite number."""
    from matplotlib.figure import Figure

    panels = []
    for title, size, names in PANELS:
        curves = {name: run.points(name) for name in names}
        known = {
            name: points
            for name, points in curves.items()
            if any(value is not None for value in points.values())
        }
        if known:
            panels.append((title, size, known))
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
        shown = [one for points in curves.values() for one in points.values() if one is not None]
        if min(shown) > 0 and max(shown) > 50 * min(shown):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
        for kind, style in STYLES.items():
            for at in sorted(at for at, found, _ in run.events if found == kind)[-MOST_LISTED:]:
                axis.axvline(at, linewidth=0.8, alpha=0.6, gid=kind, **style)
    if len(panels) % 2:
        figure.axes[-1].set_axis_off()
    return figure
