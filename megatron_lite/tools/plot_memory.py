"""Draws the memory of several recompute policies side by side:
`python -m megatron_lite.tools.plot_memory A.json B.json ... --output memory.svg`

Each panel shows the live bytes of one forward and backward against the operators run, stacked by
category, and a line through the predicted bytes of the kept and rebuilt activations. Stretches in
which a replay runs are shaded. The tool needs matplotlib, which the extra `plot` installs. It does
not import torch.
"""

import sys
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from megatron_lite.config.invocation import module_of_extra
from megatron_lite.config.run_flags import Parser
from megatron_lite.config.units import ByteUnit
from megatron_lite.data.durable_files import replacing
from megatron_lite.memory.measure.timeline import (
    ACTIVATION,
    CATEGORIES,
    GRADIENT,
    REBUILT,
    REPLAY,
    TEMPORARY,
    Event,
    Timeline,
    compared,
    read_timeline,
)
from megatron_lite.pages.document import STYLE, printable, svg_text

from .command import check_ending, tool

PANELS_IN_A_ROW, LONGEST_LINE = 4, 44
MAX_EVENTS = 500  # in one panel: more would not be visible, and would make an SVG large
# Paul Tol's "bright" scheme, whose colours a colour-blind reader can tell apart.
STYLES = {
    ACTIVATION: ("#4477AA", "activations kept from forward"),
    REBUILT: ("#EE6677", "activations rebuilt by a replay"),
    GRADIENT: ("#CCBB44", "parameter gradients"),
    TEMPORARY: ("#BBBBBB", "temporary"),
}
LINE_LABEL = "activations, predicted before the run"
REPLAY_COLOR = "#AA3377"


def _add_flags(parser: Parser) -> None:
    parser.add_argument(
        "timelines",
        nargs="+",
        metavar="FILE.json",
        help="a timeline, as a run with --memory-timeline writes it",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the picture: .svg or .png")


main = tool(
    "python -m megatron_lite.tools.plot_memory",
    "Draws the memory timelines of one or more recompute policies side by side, on one scale.",
    _add_flags,
    lambda args: plot_memory(args.timelines, args.output),
)


def plot_memory(paths: Sequence[str], output: str) -> None:
    """Draws the timelines of the files into `output`.

    Raises InputError for a file that is no timeline, for another ending than .svg or .png, and if
    matplotlib is not installed.
    """
    check_ending("--output", output, ".svg", ".png")
    matplotlib = module_of_extra("matplotlib", "plot", needed_by="the picture")
    timelines = [read_timeline(path) for path in paths]
    with replacing(output) as unfinished, matplotlib.rc_context(STYLE):
        figure = draw(timelines)
        if output.endswith(".png"):
            figure.savefig(unfinished, format="png", dpi=150)
        else:
            Path(unfinished).write_text(svg_text(figure), encoding="utf-8")


def draw(timelines: Sequence[Timeline]) -> Any:
    """Returns the matplotlib figure."""
    from matplotlib.figure import Figure

    columns = min(len(timelines), PANELS_IN_A_ROW)
    rows = -(-len(timelines) // columns)
    figure = Figure(figsize=(max(6.4, 1.2 + 2.9 * columns), 1.2 + 3 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    most = max(timeline.peak.total_bytes for timeline in timelines)
    unit = ByteUnit.of(max(most, 1))
    for panel, timeline in zip(panels, timelines, strict=False):
        _draw_panel(panel, timeline, unit)
        peak, change = timeline.peak, ""
        if timeline is not timelines[0] and (first := timelines[0].peak.total_bytes):
            change = f" ({peak.total_bytes / first - 1:+.0%})"
        panel.set_xlabel("operators run")
        panel.set_ylabel(f"live bytes [{unit.name}]")
        where = _shortened(f"{peak.operator} {peak.module}")
        panel.set_title(
            f"{_shortened(timeline.name)}\n"
            f"peak {peak.total_bytes / unit.num_bytes:.2f} {unit.name}{change} in {peak.phase}\n"
            f"{where}"
        )
    for panel in list(panels)[len(timelines) :]:
        panel.set_axis_off()
    by_label = {
        label: handle
        for panel in figure.axes
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(by_label.values(), by_label, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_panel(panel: Any, timeline: Timeline, unit: ByteUnit) -> None:
    events = thinned(timeline.events)
    colors, labels = zip(*(STYLES[category] for category in CATEGORIES), strict=True)
    panel.stackplot(
        [event.number for event in events],
        [
            [bytes_ / unit.num_bytes for bytes_ in series]
            for series in zip(*(event.live_bytes for event in events), strict=True)
        ],
        step="post",
        labels=labels,
        colors=colors,
    )
    if points := compared(timeline):
        panel.plot(
            [event.number for event, _ in points],
            [point.num_bytes / unit.num_bytes for _, point in points],
            **dict(color="black", linewidth=1.2, marker="o", markersize=2.5, label=LINE_LABEL),
        )
    stretches = [
        (next(stretch).number, phase)
        for phase, stretch in groupby(timeline.events, lambda event: event.phase)
    ]
    for (start, phase), (stop, _) in pairwise([*stretches, (timeline.events[-1].number, "")]):
        if phase == REPLAY:
            panel.axvspan(
                start, stop, color=REPLAY_COLOR, alpha=0.15, zorder=0, label="a replay runs"
            )
    panel.margins(x=0)


def thinned(events: Sequence[Event]) -> list[Event]:
    """Returns at most MAX_EVENTS events: of each stretch the event with the most bytes.

    A peak is therefore never dropped.
    """
    length = -(-len(events) // MAX_EVENTS)
    return [
        max(events[start : start + length], key=lambda event: event.total_bytes)
        for start in range(0, len(events), length)
    ]


def _shortened(text: str) -> str:
    """Returns `text` as one printable line. A text that is too long keeps its end."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= LONGEST_LINE else "…" + line[1 - LONGEST_LINE :].lstrip(".")


if __name__ == "__main__":
    sys.exit(main())
