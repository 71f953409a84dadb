"""The targets of the step, and what benchmarks/side_by_side.py measured of each.

Every figure is a ratio of wall times, or of peaks, in one block. The figure of a target is the
worst of all blocks that it is about. docs/performance-peers.md shows the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Report = Mapping[str, Any]
OURS = "ours, none"
SETTINGS = ("none", "full", "core_attn", "distributed")  # those of megatron-core
NOT_MEASURED = "not measured"


class Figure(NamedTuple):
    """A measured figure.

    where: its block, and what it is compared with. products: what the ratio of times would be if
    our step were the model's matrix products alone, in the time that torch's own library takes.
    """

    value: float
    where: str
    products: float | None = None


class Target(NamedTuple):
    """A figure that is to be at most `limit`.

    find: yields the figures from the report of side_by_side.py and that of planning_seconds.py.
    Each may be empty. unit: of the figure; "" for a ratio.
    """

    name: str
    limit: float
    find: Callable[[Report, Report], Iterator[Figure]]
    unit: str = ""


def _blocks(report: Report, **setting: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the title and the rows by name of each block with these settings and with ours."""
    for result in report.get("blocks", ()):
        rows = {row["name"]: row for row in result["rows"] if row["same_work"]}
        if OURS in rows and all(result["block"][key] == value for key, value in setting.items()):
            yield result["title"], rows


def _is_peer(name: str) -> bool:
    return not name.startswith("ours")


def _is_compiled(name: str) -> bool:
    return name.endswith("compiled")


def _over_fastest(report: Report, *, compiled: bool, **setting: Any) -> Iterator[Figure]:
    """Yields the time of ours over that of the fastest peer of each block."""
    for title, rows in _blocks(report, tp_size=1, **setting):
        ratios = {
            name: row["wall_ratio"][0]
            for name, row in rows.items()
            if _is_peer(name) and _is_compiled(name) is compiled
        }
        if ratios:
            fastest = min(ratios, key=lambda name: ratios[name])
            yield Figure(
                1.0 / ratios[fastest], f"{title}; {fastest}", rows[fastest]["gemm_fraction"]
            )


def _bf16(report: Report, _: Report) -> Iterator[Figure]:
    """Yields the times on the machines whose processors multiply bf16."""
    every = report.get("bf16_instructions")
    blocks = [one for one in report.get("blocks", ()) if one.get("bf16_instructions", every)]
    yield from _over_fastest({**report, "blocks": blocks}, compiled=False, dtype="bf16")


def _over_megatron(report: Report, _: Report) -> Iterator[Figure]:
    """Yields the time of each of our settings over that of the faster attention of theirs."""
    for title, rows in _blocks(report, tp_size=2):
        for setting in SETTINGS:
            ours = rows.get(f"ours, {setting}")
            theirs = {
                name: row["wall_ratio"][0]
                for name, row in rows.items()
                if name.startswith("megatron-core") and name.endswith(f", {setting}")
            }
            if ours and theirs:
                fastest = min(theirs, key=lambda name: theirs[name])
                yield Figure(
                    ours["wall_ratio"][0] / theirs[fastest],
                    f"{title}; {fastest}",
                    rows[fastest]["gemm_fraction"],
                )


def _peak(report: Report, _: Report) -> Iterator[Figure]:
    """Yields the peak of ours over the lowest peak of a peer that recomputes nothing."""
    for title, rows in _blocks(report):
        peaks = {
            name: row["peak_bytes"]
            for name, row in rows.items()
            if _is_peer(name) and (name.endswith(", none") or _is_compiled(name))
        }
        if peaks:
            lowest = min(peaks, key=lambda name: peaks[name])
            yield Figure(rows[OURS]["peak_bytes"] / peaks[lowest], f"{title}; {lowest}")


def _quickstart(_: Report, seconds: Report) -> Iterator[Figure]:
    for row in seconds.get("rows", ()):
        if row["name"] == "quickstart":
            yield Figure(row["wall_s"], f"{seconds['device']}, {seconds['processors']} processors")


TARGETS = (
    Target(
        "time of `none`, float32, 1 thread, over the fastest eager peer",
        0.97,
        lambda report, _: _over_fastest(report, compiled=False, dtype="float32", threads=1),
    ),
    Target(
        "time of `none`, float32, 1 thread, over the fastest compiled peer",
        1.00,
        lambda report, _: _over_fastest(report, compiled=True, dtype="float32", threads=1),
    ),
    Target(
        "time of `none`, bf16, over the fastest eager peer, on a CPU with bf16 instructions",
        0.80,
        _bf16,
    ),
    Target(
        "time at TP 2 over megatron-core's at TP 2, in every recompute setting",
        0.80,
        _over_megatron,
    ),
    Target("peak of `none` over the lowest peak of a peer without recomputation", 0.90, _peak),
    Target("the quickstart from start to end, its environment installed", 60.0, _quickstart, " s"),
)


def verdict(target: Target, figures: list[Figure]) -> str:
    """Returns "met", "missed by .. %" or "not measured". The worst figure decides."""
    if not figures:
        return NOT_MEASURED
    worst = max(figure.value for figure in figures)
    return "met" if worst <= target.limit else f"missed by {worst / target.limit - 1.0:.1%}"


def targets_table(report: Report, seconds: Report) -> str:
    """Returns the table of all targets in Markdown."""
    lines = [
        "| target | at most | measured | products alone | where | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        figures = list(target.find(report, seconds))
        digits = 0 if target.unit else 2
        measured, products, where = NOT_MEASURED, "", ""
        if figures:
            worst = max(figures)
            measured = f"{worst.value:.{digits}f}{target.unit}"
            if len(figures) > 1:
                least = min(figure.value for figure in figures)
                measured += f", the worst of {len(figures)}; the best is {least:.{digits}f}"
            where = worst.where
            products = "" if worst.products is None else f"{worst.products:.2f}"
        lines.append(
            f"| {target.name} | {target.limit:.{digits}f}{target.unit} | {measured} "
            f"| {products} | {where} | {verdict(target, figures)} |"
        )
    return "\n".join(lines)
