"""Draws the memory of several recompute policies side by side:
`python -m megatron_lite.tools.plot_memory A.json B.json ... --output memory.svg`

Each panel shows the live bytes of one forward and backward against the operators run, stacked by
category, and a line through the predicted bytes of the kept and rebuilt activations. Two strips
below it show the running phase and layer. An SVG follows the dark mode of its reader. The tool
needs matplotlib, which the extra `plot` installs. It does not import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from megatron_lite.config.checks import InputError
from megatron_lite.config.invocation import module_of_extra
from megatron_lite.config.parser import Parser
from megatron_lite.config.units import ByteUnit
from megatron_lite.data.durable_files import replacing
from megatron_lite.memory.measure.compared import compared, layer_of
from megatron_lite.memory.measure.timeline import (
    ACTIVATION,
    BACKWARD,
    CATEGORIES,
    FORWARD,
    GRADIENT,
    PHASES,
    REBUILT,
    REPLAY,
    TEMPORARY,
    Event,
    Timeline,
    read_timeline,
)
from megatron_lite.pages.document import STYLE, svg_text
from megatron_lite.tools.command import exit_status

PROGRAM = "python -m megatron_lite.tools.plot_memory"

ENDINGS = (".svg", ".png")
PANELS_IN_A_ROW = 4
MAX_EVENTS = 2000  # in one panel: more would not be visible, and would make an SVG large
# Paul Tol's "bright" scheme, whose colours a colour-blind reader can tell apart.
CATEGORY_COLORS = {
    ACTIVATION: "#4477AA",
    REBUILT: "#EE6677",
    GRADIENT: "#CCBB44",
    TEMPORARY: "#BBBBBB",
}
CATEGORY_LABELS = {
    ACTIVATION: "activations kept from forward",
    REBUILT: "activations rebuilt by a replay",
    GRADIENT: "parameter gradients",
    TEMPORARY: "temporary",
}
LINE_LABEL = "activations, predicted before the run"
PHASE_COLORS = {FORWARD: "#66CCEE", REPLAY: "#AA3377", BACKWARD: "#DDDDDD"}


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    parser = Parser(
        prog=program,
        allow_abbrev=False,
        description=(
            "Draws the memory timelines of one or more recompute policies side by side, on "
            "one scale."
        ),
    )
    parser.add_argument(
        "timelines",
        nargs="+",
        metavar="FILE.json",
        help="a timeline, as a run with --memory-timeline writes it",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the picture: .svg or .png")
    args = parser.parse_args(argv)
    return exit_status(lambda: plot_memory(args.timelines, args.output), program)


def plot_memory(paths: Sequence[str], output: str) -> None:
    """Draws the timelines of the files into `output`.

    Raises InputError for a file that is no timeline, for another ending than .svg or .png, and if
    matplotlib is not installed.
    """
    ending = os.path.splitext(output)[1]
    if ending not in ENDINGS:
        raise InputError(f"--output must end in {' or '.join(ENDINGS)} (got {output!r})")
    matplotlib = module_of_extra("matplotlib", "plot", needed_by="the picture")
    for path in paths:
        if not os.path.isfile(path):
            what = "is a folder" if os.path.isdir(path) else "no such file"
            raise InputError(f"{path}: {what}: give files that runs wrote with --memory-timeline")
    timelines = [read_timeline(path) for path in paths]
    with replacing(output) as unfinished, matplotlib.rc_context(STYLE):
        figure = draw(timelines)
        if ending == ".png":
            figure.savefig(unfinished, format="png", dpi=150)
        else:
            with open(unfinished, "w", encoding="utf-8") as file:
                file.write(svg_text(figure))


def draw(timelines: Sequence[Timeline]) -> Any:
    """Returns the matplotlib figure."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    columns = min(len(timelines), PANELS_IN_A_ROW)
    rows = -(-len(timelines) // columns)
    # A page shows three panels about 840 pixels wide, so a font of 8 points has 9 pixels there.
    legend_columns = min(columns + 1, 4)
    size = (max(6.4, 1.2 + 2.9 * columns), 0.5 + 2.4 / legend_columns + 3.1 * rows)
    figure = Figure(figsize=size, layout="constrained")
    # A row of panels is three rows of axes: the bytes, the phase, the layer.
    axes = figure.subplots(
        3 * rows,
        columns,
        sharex=True,
        squeeze=False,
        gridspec_kw=dict(height_ratios=[24, 1, 1] * rows),
    )
    most = max(1, *(timeline.peak.total_bytes for timeline in timelines))
    unit = ByteUnit.of(most)
    longest = max(timeline.events[-1].number for timeline in timelines)
    for place in range(rows * columns):
        panel = [axes[3 * (place // columns) + part][place % columns] for part in range(3)]
        if place < len(timelines):
            _draw_panel(
                panel, timelines[place], timelines[0], unit, first_in_row=place % columns == 0
            )
            _draw_layers(panel[2], timelines[place], longest)
            panel[0].set_ylim(0, 1.3 * most / unit.num_bytes)
        else:
            for part in panel:
                part.set_axis_off()
    handles: list[Any] = [
        Patch(color=CATEGORY_COLORS[category], label=CATEGORY_LABELS[category])
        for place, category in enumerate(CATEGORIES)
        if any(_has(timeline.events, place) for timeline in timelines)
    ]
    ran = [
        phase
        for phase in PHASES
        if any(event.phase == phase for timeline in timelines for event in timeline.events)
    ]
    handles += [Patch(color=PHASE_COLORS[phase], label=f"phase: {phase}") for phase in ran]
    if any(timeline.predicted for timeline in timelines):
        handles.append(Line2D([], [], color="black", lw=1.2, marker="o", ms=3, label=LINE_LABEL))
    figure.legend(handles=handles, loc="outside lower center", ncols=legend_columns, frameon=False)
    figure.suptitle("Live memory of one forward and backward", fontsize=12, fontweight="bold")
    return figure


def _has(events: Sequence[Event], place: int) -> bool:
    """Returns whether the category at this place of `live_bytes` has any bytes."""
    return any(event.live_bytes[place] for event in events)


def _draw_panel(
    panel: Sequence[Any], timeline: Timeline, first: Timeline, unit: ByteUnit, *, first_in_row: bool
) -> None:
    main, phases, layers = panel
    events = thinned(timeline.events)
    shown = [place for place in range(len(CATEGORIES)) if place == 0 or _has(events, place)]
    series = [[event.live_bytes[place] / unit.num_bytes for event in events] for place in shown]
    main.grid(axis="y", color="#DDDDDD", linewidth=0.6, gid="grid")
    main.stackplot(
        [event.number for event in events],
        series,
        step="post",
        linewidth=0,
        zorder=2,
        colors=[CATEGORY_COLORS[CATEGORIES[place]] for place in shown],
    )
    points = compared(timeline)
    if points:
        main.plot(
            [point.number for point in points],
            [point.predicted_bytes / unit.num_bytes for point in points],
            **dict(color="black", linewidth=1.2, marker="o", markersize=2.5, zorder=3),
        )
    main.set_title(_shortened(timeline.name, 48), fontsize=10)
    main.margins(x=0)
    _annotate_peak(main, timeline, first, unit)
    for start, stop, phase in _runs(timeline.events, lambda event: event.phase):
        phases.axvspan(start, stop, color=PHASE_COLORS[phase], linewidth=0)
        if phase == REPLAY:
            main.axvspan(start, stop, color=PHASE_COLORS[phase], linewidth=0, alpha=0.1)
    layers.set_xlabel("operators run")
    for part in (main, phases):
        part.tick_params(bottom=False)
    for strip, name in ((phases, "phase"), (layers, "layer")):
        strip.set_yticks([])
        strip.set_frame_on(False)
        strip.set_ylabel(name if first_in_row else "", rotation=0, ha="right", va="center")
    main.set_ylabel(f"live bytes [{unit.name}]" if first_in_row else "")
    main.tick_params(labelleft=first_in_row)
    layers.tick_params(labelbottom=True)  # also where panels of the next row share the axis


def _draw_layers(strip: Any, timeline: Timeline, length: int) -> None:
    """Draws the layers that ran as a strip, with their numbers where these have room.

    length: the number of operators that the axis shows.
    """
    for start, stop, layer in _runs(timeline.events, lambda event: layer_of(event.module)):
        if layer is not None:
            strip.axvspan(start, stop, color="#555555" if layer % 2 else "#888888", linewidth=0)
            if stop - start > 0.024 * length * len(str(layer)):
                strip.text(
                    (start + stop) / 2,
                    0.45,
                    str(layer),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white",
                    transform=strip.get_xaxis_transform(),
                )


def _annotate_peak(axes: Any, timeline: Timeline, first: Timeline, unit: ByteUnit) -> None:
    peak, reference = timeline.peak, first.peak.total_bytes
    change = ""
    if timeline is not first and reference:
        change = f" ({peak.total_bytes / reference - 1:+.0%})".replace("-", "\N{MINUS SIGN}")
    text = "\n".join(
        [
            f"peak {peak.total_bytes / unit.num_bytes:.2f} {unit.name}{change}",
            f"in {peak.phase}, {_shortened(peak.operator, 32) or 'the end'}",
            _shortened(peak.module, 48) or "outside of the modules",
        ]
    )
    axes.annotate(
        text,
        xy=(peak.number, peak.total_bytes / unit.num_bytes),
        xytext=(0.5, 0.99),
        textcoords="axes fraction",
        ha="center",
        va="top",
        fontsize=8,
        arrowprops=dict(arrowstyle="->", color="#333333"),
    )


def thinned(events: Sequence[Event]) -> list[Event]:
    """Returns at most MAX_EVENTS events: of each stretch the event with the most bytes.

    A peak is therefore never dropped.
    """
    length = -(-len(events) // MAX_EVENTS)
    return [
        max(events[start : start + length], key=lambda event: event.total_bytes)
        for start in range(0, len(events), length)
    ]


def _runs(events: Sequence[Event], key: Any) -> Iterator[tuple[int, int, Any]]:
    """Yields (first number, number after, value) of each stretch of events with equal `key`."""
    start = events[0].number
    for value, stretch in groupby(
        zip(events, [*events[1:], events[-1]], strict=True), lambda pair: key(pair[0])
    ):
        stop = list(stretch)[-1][1].number
        yield start, stop, value
        start = stop


def _shortened(text: str, length: int) -> str:
    """Returns `text` as one printable line. A text that is too long keeps its end."""
    line = " ".join(
        "".join(character if character.isprintable() else " " for character in text).split()
    )
    return line if len(line) <= length else "…" + line[1 - length :].lstrip(".")


if __name__ == "__main__":
    sys.exit(main())
