"""The generated parts of docs/performance-peers.md, made of the committed results.

`python -m tests.docs.generate --write docs/performance-peers.md` writes them. Without results a
part says "not measured".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.side_by_side_report import PANELS, figure_of
from benchmarks.side_by_side_targets import NOT_MEASURED, OURS, targets_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
# The results of each kind of processor: what a block's title says of it, and the file.
MACHINES = {"Zen 5": "side-by-side", "Zen 4": "side-by-side-zen4", "Zen 3": "side-by-side-zen3"}
MIB = 2.0**20
MOST_PANELS = 8  # of a picture
Report = Mapping[str, Any]


def read(name: str) -> dict[str, Any]:
    """Returns benchmarks/results/cpu/NAME.json; an empty report if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def targets_part() -> str:
    """Returns the table of targets, over the blocks of all machines."""
    reports = {machine: read(name) for machine, name in MACHINES.items()}
    return targets_table(of_all_machines(reports), read("planning_seconds"))


def of_all_machines(reports: Mapping[str, Report]) -> dict[str, Any]:
    """Returns one report with the blocks of all. The title of each names its machine."""
    return {
        "blocks": [
            {**result, "bf16_instructions": report.get("bf16_instructions")}
            for machine, report in reports.items()
            for result in _named(machine, report)
        ]
    }


def _named(machine: str, report: Report) -> list[Report]:
    """Returns the blocks of a report, with the machine's name in their titles."""
    return [
        {**result, "title": f"{machine}, {result['title']}"} for result in report.get("blocks", ())
    ]


def groups_part(report: Report | None = None, *, machine: str = "Zen 5") -> str:
    """Returns the tables of all blocks of a report, by default those of a machine's results."""
    if report is None:
        results = read(MACHINES[machine])
        report = {**results, "blocks": _named(machine, results)}
    lines = list(_groups(report)) if report.get("blocks") else [f"{NOT_MEASURED.capitalize()}."]
    return "\n".join(lines)


def _groups(report: Report) -> Iterator[str]:
    versions = ", ".join(f"{name} {one}" for name, one in report["versions"].items() if one)
    has = ", ".join(report.get("bf16_instructions") or ["none"])
    yield f"{report['device']}; bf16 instructions: {has}. {versions}. {report['date'][:10]}."
    for result in report["blocks"]:
        yield f"\n### {result['title']}\n"
        yield from _group(result)


def _group(result: Report) -> Iterator[str]:
    base = next((row for row in result["rows"] if row["name"] == OURS), None)
    if base is not None:
        rounds = base.get("rounds", result["block"]["rounds"])
        yield f"Rounds: {rounds}. A step of `{OURS}` takes {base['wall_ms']:.0f} ms.\n"
    yield "| contestant | wall time | least to most | processor time | peak, MiB | of the bound |"
    yield "|---|---|---|---|---|---|"
    for row in result["rows"]:
        middle, low, high = row["wall_ratio"]
        name = row["name"] + ("" if row["same_work"] else " (other work!)")
        own = row.get("rounds", result["block"]["rounds"])
        if base is not None and own != base.get("rounds", own):
            name += f" ({own} rounds)"
        yield (
            f"| {name} | {middle:.2f} | {low:.2f} to {high:.2f} | {row['cpu_ratio'][0]:.2f} "
            f"| {row['peak_bytes'] / MIB:.1f} | {row['gemm_fraction']:.0%} |"
        )
    for kind, words in (("failed", "failed"), ("skipped", "left out")):
        for name, reason in result.get(kind, {}).items():
            text = (reason.splitlines() or [""])[0].replace("|", "/").replace("<", "&lt;")
            yield f"| {name} | {words}: {text[:100]} | | | | |"


def picture(kind: str, report: Report | None = None) -> str:
    """Returns a picture as SVG. kind: one of PANELS, "time" or "memory"."""
    import matplotlib
    from matplotlib.figure import Figure

    from megatron_lite.tools.plot_memory import STYLE, svg_text

    report = read("side-by-side") if report is None else report
    results = [result for result in report.get("blocks", ()) if result["rows"]][:MOST_PANELS]
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": f"peers {kind}"}):
        if results:
            return svg_text(figure_of(report, results, *PANELS[kind], clock="wall"))
        figure = Figure(figsize=(6.0, 1.0))
        figure.text(0.5, 0.5, NOT_MEASURED, ha="center", va="center")
        return svg_text(figure)
