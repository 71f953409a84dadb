"""The generated parts of docs/performance-recompute.md, made of the committed results.

`python -m tests.docs.generate --write docs/performance-recompute.md` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "cpu"


def recompute_cost_part(name: str) -> str:
    """Returns the tables of benchmarks/results/cpu/NAME.json."""
    return figures(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def figures(report: Mapping[str, Any]) -> str:
    """Returns the tables of a report of benchmarks/recompute_cost.py."""
    shape = report["shape"]
    lines = [
        f"{report['device']}, {report['threads']} thread, torch {report['torch']}, processor time, "
        f"medians of {report['rounds']} rounds.",
        f"{shape['num_layers']} layers of hidden size {shape['hidden_size']} with "
        f"{shape['num_attention_heads']} heads, {shape['batch_size']} x {shape['seq_length']} "
        f"tokens, {shape['vocab_size']:,} ids.",
        "",
        "A step without the optimizer. The columns of policies have its time over the time of "
        "`none` in the same mode.",
        "",
        "| dtype | dropout | none, ms | pointwise | full | compiled none over eager none "
        "| pointwise, compiled | full, compiled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["steps"]:
        ratio = {name: f"{values[0]:.3f}" for name, values in row["ratios"].items()}
        lines.append(
            f"| {row['dtype']} | {row['dropout']} | {row['ms']['eager none']:.0f} | "
            f"{ratio['eager pointwise']} | {ratio['eager full']} | "
            f"{ratio['compiled over eager']} | "
            f"{ratio['compiled pointwise']} | {ratio['compiled full']} |"
        )
    lines += [
        "",
        "The Python of one region, forward and backward, in us of processor time: "
        + ", ".join(f"{name} {us:.0f}" for name, us in report["regions"].items())
        + ".",
        "",
    ]
    if "starts" in report:  # a run that was cut short lacks them
        lines += [
            "The first step of a process, in seconds of processor time, the compiler's included: "
            + ", ".join(f"{name} {seconds:.1f}" for name, seconds in report["starts"].items())
            + ".",
            "",
        ]
    return "\n".join(lines)
