"""Draws the reports of benchmarks/recompute.py: step time over the peak, one point per engine.

    python benchmarks/recompute.py --json recompute.json
    python benchmarks/pareto.py recompute.json --output pareto.svg

The picture has one panel per setting. The line is our front: no point of ours is both smaller and
faster than one on it. Several reports may be given, such as one with more rounds of a few engines.
The rounds of an engine in a setting are then put together.
The program prints the points of others that no point of ours matches in both bytes and time, up to
a margin of 2%. If it finds one, its exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PEERS = ("torch ", "transformers")
# label, prefix of the names, mark, colour
KINDS = (
    ("megatron_lite", "", "o", "tab:blue"),
    ("torch.utils.checkpoint", "torch ", "s", "tab:red"),
    ("transformers", "transformers", "^", "tab:orange"),
)
MIB = 2**20


class Point(NamedTuple):
    """One engine in one setting.

    peak_mib: the most bytes alive in forward and backward.
    time: the time of a step over that of our `none` in the same rounds, the median.
    """

    name: str
    peak_mib: float
    time: float

    @property
    def is_ours(self) -> bool:
        """Whether the engine is a policy of this project."""
        return not self.name.startswith(PEERS)

    def dominates(self, other: Point) -> bool:
        """Returns whether this point is no larger and no slower than `other`, and not equal."""
        mine, others = (self.peak_mib, self.time), (other.peak_mib, other.time)
        return mine != others and mine[0] <= others[0] and mine[1] <= others[1]


def front(points: Sequence[Point]) -> list[Point]:
    """Returns the points that no other point dominates, by size."""
    kept = (point for point in points if not any(other.dominates(point) for other in points))
    return sorted(kept, key=lambda point: point.peak_mib)


def beyond_our_front(points: Sequence[Point], *, margin: float = 0.02) -> list[Point]:
    """Returns the peers that no point of ours matches.

    Each point of ours is larger or slower than such a peer by more than the margin.
    """
    ours = [point for point in points if point.is_ours]
    return [
        peer
        for peer in points
        if not peer.is_ours
        and not any(
            mine.peak_mib <= peer.peak_mib * (1.0 + margin)
            and mine.time <= peer.time * (1.0 + margin)
            for mine in ours
        )
    ]


def settings_of(reports: Sequence[dict[str, Any]]) -> dict[str, list[Point]]:
    """Returns {title: points} of reports of recompute.py, with their rounds put together."""
    peaks: dict[tuple[str, str], int] = {}
    ratios: dict[tuple[str, str], list[float]] = {}
    for report in reports:
        samples = {(_title(row), row["engine"]): row["samples_ms"] for row in report["rows"]}
        for row in report["rows"]:
            key, nones = (_title(row), row["engine"]), samples[_title(row), "none"]
            peaks[key] = row["peak_bytes"]
            ratios.setdefault(key, []).extend(
                mine / none for mine, none in zip(samples[key], nones, strict=True)
            )
    panels: dict[str, list[Point]] = {}
    for (title, engine), times in ratios.items():
        panels.setdefault(title, []).append(
            Point(engine, peaks[title, engine] / MIB, statistics.median(times))
        )
    return panels


def _title(row: dict[str, Any]) -> str:
    parallel = f"TP {row['tp_size']}{' + SP' if row['sequence_parallel'] else ''}"
    return f"{parallel}, {row['dtype']}, dropout {row['dropout']}"


def draw(panels: dict[str, list[Point]], output: Path, subtitle: str) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(7.5 * columns, 5.2 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, points) in zip(axes.flat, panels.items(), strict=False):
        line = front([point for point in points if point.is_ours])
        axis.plot(
            [point.peak_mib for point in line],
            [point.time for point in line],
            color="tab:blue",
            linewidth=1,
            zorder=1,
        )
        for label, prefix, mark, color in KINDS:
            chosen = [
                point
                for point in points
                if (point.name.startswith(prefix) if prefix else point.is_ours)
            ]
            axis.scatter(
                [point.peak_mib for point in chosen],
                [point.time for point in chosen],
                marker=mark,
                color=color,
                s=36,
                label=label,
                zorder=2,
            )
        for point in line:
            axis.annotate(
                point.name,
                (point.peak_mib, point.time),
                textcoords="offset points",
                xytext=(5, 4),
                fontsize=7,
            )
        axis.set(title=title, xlabel="most bytes alive [MiB]", ylabel="step time / none")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(subtitle, fontsize=10)
    figure.savefig(output, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the picture. Returns 0, or 1 if a peer is beyond our front."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=Path, nargs="+", help="reports of recompute.py")
    parser.add_argument("--output", type=Path, required=True, help="the picture: .svg or .png")
    args = parser.parse_args(argv)
    reports = [json.loads(path.read_text()) for path in args.json]
    report, panels = reports[0], settings_of(reports)
    draw(
        panels,
        args.output,
        f"{report['device']}, {report['threads']} CPU thread(s), torch {report['torch']}, "
        f"{report['date'][:10]}",
    )
    status = 0
    for title, points in panels.items():
        for peer in beyond_our_front(points):
            print(
                f"{title}: {peer.name} ({peer.peak_mib:.1f} MiB, {peer.time:.2f}) is beyond "
                "our front"
            )
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
