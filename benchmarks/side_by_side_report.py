"""The tables and pictures of benchmarks/side_by_side.py.

python benchmarks/side_by_side_report.py JSON       shows and draws a report again
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("torch", "transformers", "megatron-core", "litgpt", "numpy")
MIB = 2.0**20
POINT = 5.0  # half the size of a point in a picture, in pixels
COLOURS = {"ours": "tab:blue", "plain": "tab:green", "transformers": "tab:orange"}
OTHER_COLOURS = {"megatron-core": "tab:red", "litgpt": "tab:purple"}
HEADER = (
    f"{'':33}{'wall':>8} {'time / ours, none (min-max)':^35} {'peak':>8} {'/':>5}{'of':>6}\n"
    f"{'contestant':33}{'ms':>8} {'wall':^17} {'processor':^17} {'MiB':>8} {'ours':>5}{'bound':>6}"
)


def versions() -> dict[str, str | None]:
    """Returns the versions of the libraries; None: not installed."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def table(result: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of one block, of at most 100 columns."""
    yield f"\n{result['title']}"
    if result["rows"]:
        yield HEADER
    for row in result["rows"]:
        wall, cpu = (_shown(row[f"{clock}_ratio"]) for clock in ("wall", "cpu"))
        yield (
            f"{row['name']:33}{row['wall_ms']:8.1f} {wall:17} {cpu:17} "
            f"{row['peak_bytes'] / MIB:8.1f} {row['peak_ratio']:5.2f}{row['gemm_fraction']:6.0%}"
            f"{'' if row['same_work'] else ' !'}"
        )
    for name, reason in result.get("failed", {}).items():
        yield f"{name:33}failed: {reason.splitlines()[0]}"[:100]
    if any(not row["same_work"] for row in result["rows"]):
        yield "!: its parameters, loss or FLOPs are not those of ours"
    for name, reason in result["skipped"].items():
        yield f"{name} left out: {reason.splitlines()[0]}"[:100] if reason else f"{name} left out"


def _shown(ratio: list[float]) -> str:
    middle, low, high = ratio
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def draw(report: dict[str, Any], output: Path) -> list[Path]:
    """Writes two pictures beside the report: times, and time over peak. None without matplotlib."""
    blocks = [block for block in report["blocks"] if block["rows"]]
    try:
        import matplotlib
    except ImportError:
        print("no pictures: matplotlib is not installed", file=sys.stderr)
        return []
    if not blocks:
        return []
    found = []
    with matplotlib.rc_context({"svg.hashsalt": "side by side"}):
        for name, panel in PANELS.items():
            found.append(output.with_name(f"{output.stem}-{name}.svg"))
            figure = figure_of(report, blocks, *panel, clock="cpu")
            figure.savefig(found[-1], metadata={"Date": None})
    return found


def figure_of(
    report: Mapping[str, Any],
    blocks: Sequence[Mapping[str, Any]],
    panel: Callable[..., None],
    height: float,
    *,
    clock: str,
) -> Any:
    """Returns a matplotlib figure with a panel for each block, one below the other.

    A page shows the figure about 840 pixels wide, so a font of 8 points has 11 pixels there.
    height: of a row, in inches. clock: "wall" or "cpu".
    """
    from matplotlib.figure import Figure

    heights = [0.9 + height * len(block["rows"]) for block in blocks]
    figure = Figure(figsize=(8.0, 0.3 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(blocks), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axis, block in zip(axes.flat, blocks, strict=True):
        panel(axis, block["rows"], clock)
        axis.set_title(block["title"], fontsize=9)
    quick = ", quick run" if report["is_quick"] else ""
    figure.suptitle(
        f"{report['device']}, torch {report['versions']['torch']}, {report['date'][:10]}{quick}",
        fontsize=9,
    )
    figure.draw_without_rendering()  # gives every panel its place
    # The solver's last bits differ from call to call, and names in the file are hashes of places.
    figure.set_layout_engine("none")
    for axis in axes.flat:
        axis.set_position([round(value, 4) for value in axis.get_position().bounds])
        _spread_labels(axis, axis.texts)
    return figure


def _bars(axis: Any, rows: Sequence[Mapping[str, Any]], clock: str) -> None:
    names = [row["name"] for row in rows]
    ratios = [row[f"{clock}_ratio"] for row in rows]
    reach = [[one[0] - one[1] for one in ratios], [one[2] - one[0] for one in ratios]]
    colours = [_colour(name) for name in names]
    axis.barh(names, [one[0] for one in ratios], xerr=reach, color=colours, height=0.7)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.set_xlabel(f"{CLOCKS[clock]} / ours, none (median, least, most)", fontsize=8)


def _points(axis: Any, rows: Sequence[Mapping[str, Any]], clock: str) -> None:
    for row in rows:
        place = (row["peak_bytes"] / MIB, row[f"{clock}_ratio"][0])
        axis.scatter(*place, color=_colour(row["name"]), s=30)
        axis.annotate(
            row["name"],
            place,
            textcoords="offset points",
            xytext=(5, 3),
            fontsize=8,
            arrowprops=dict(arrowstyle="-", linewidth=0.5, color="#888888", shrinkA=0, shrinkB=2),
        )
    axis.grid(alpha=0.3, gid="grid")
    axis.margins(x=0.1, y=0.1)
    axis.tick_params(labelsize=8)
    axis.set_xlabel("peak of forward and backward [MiB]", fontsize=8)
    axis.set_ylabel(f"{CLOCKS[clock]} / ours, none", fontsize=8)


def _spread_labels(axis: Any, labels: Sequence[Any]) -> None:
    """Moves each label to the nearest place where it covers no point and no other label."""
    transform, points = axis.transData.transform, [label.xy for label in labels]
    taken = [Box.around(*transform(point), POINT) for point in points]
    frame = axis.get_window_extent()
    for label, point in zip(labels, points, strict=True):
        extent = label.get_window_extent()
        width, height = extent.width, extent.height
        boxes = list(_places(*transform(point), width, height))
        inside = [box for box in boxes if frame.x0 <= box.left and box.right <= frame.x1]
        free = [box for box in inside if not any(box.meets(other) for other in taken)]
        box = (free or inside or boxes)[0]
        taken.append(box)
        scale = 72.0 / axis.figure.dpi
        x, y = transform(point)
        label.set_position(((box.left - x) * scale, (box.low - y) * scale))
        near = abs(box.left - x) < 2 * POINT or abs(box.right - x) < 2 * POINT
        label.arrow_patch.set_visible(not near or abs((box.low + box.high) / 2 - y) > 1.5 * height)


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    low: float
    right: float
    high: float

    @classmethod
    def around(cls, x: float, y: float, size: float) -> Box:
        """Returns the square with this middle. size: half of its side."""
        return cls(x - size, y - size, x + size, y + size)

    def meets(self, other: Box) -> bool:
        """Returns whether both have a common pixel."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.low < other.high
            and other.low < self.high
        )


def _places(x: float, y: float, width: float, height: float) -> Iterator[Box]:
    """Yields places of a label, the nearest to its point first: right, left, and rows away."""
    gap = 1.5 * POINT
    for row in (0.0, 0.8, -0.8, 1.6, -1.6, 2.4, -2.4, 3.2, -3.2, 4.0, -4.0):
        low = y + row * height - height / 2
        for left in (x + gap, x - gap - width, x - width / 2):
            yield Box(left, low, left + width, low + height)


CLOCKS = {"wall": "wall time", "cpu": "processor time"}
# The two pictures: what draws a panel, and the height of a row in inches.
PANELS: dict[str, tuple[Callable[..., None], float]] = {
    "time": (_bars, 0.2),
    "memory": (_points, 0.24),
}


def _colour(name: str) -> str:
    for prefix, colour in (COLOURS | OTHER_COLOURS).items():
        if name.startswith(prefix):
            return colour
    return "tab:gray"


def main(argv: list[str]) -> int:
    """Shows and draws a report. Returns 0."""
    path = Path(argv[0])
    report = json.loads(path.read_text())
    for result in report["blocks"]:
        print(*table(result), sep="\n")
    print(*draw(report, path), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
