"""The planning page: the verdict, plans by time and memory, and the memory of every stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lite.pages.document import GIB, document, picture, printable

Stages = Sequence[Mapping[str, Any]]  # by pipeline rank: {"rank", "terms"}


def plan_page(found: Mapping[str, Any], stages: Sequence[Stages], notes: Sequence[str] = ()) -> str:
    """Returns the planning page as an HTML document.

    found: what `plan --json` writes. stages: of each verdict, the terms of the ranks of its plan.
    """
    pictures = [
        picture(figure, one, own) if one["plans"] or one["smallest"] else ""
        for one, own in zip(found["verdicts"], stages, strict=True)
    ]
    title = f"Plan for {found['machine']}"
    return document(
        "plan.html", title, notes, verdicts=found["verdicts"], stages=stages, pictures=pictures
    )


def figure(one: Mapping[str, Any], stages: Stages) -> Any:
    """Returns the matplotlib figure: plans by time and memory, and a stacked bar for each rank.

    The lines are the memory, and the memory without the reserve.
    """
    from matplotlib.figure import Figure

    whole = Figure(figsize=(11, max(4.0, 1.5 + 0.2 * len(stages))), layout="constrained")
    plans, bars = whole.subplots(1, 2)
    for label, marker, found in (
        ("one step away", "x", one["neighbours"]),
        ("plans", "o", one["plans"]),
        ("best plan", "*", one["plans"][:1] or [one["smallest"]]),
    ):
        seconds = [each["step_seconds"] for each in found]
        gib = [each["peak_bytes"] / GIB for each in found]
        plans.plot(seconds, gib, linestyle="", marker=marker, label=label)
    plans.set_xlabel("seconds of a step, estimated")
    plans.set_ylabel("peak of the fullest rank [GiB]")
    plans.legend(frameon=False)
    ranks = [str(stage["rank"]) for stage in stages]
    ends = [0.0] * len(stages)
    for name in dict.fromkeys(term["name"] for stage in stages for term in stage["terms"]):
        widths = [
            sum(term["bytes"] for term in stage["terms"] if term["name"] == name) / GIB
            for stage in stages
        ]
        bars.barh(ranks, widths, left=ends, label=printable(name))
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    bars.set_xlabel("peak [GiB]")
    bars.set_ylabel("pipeline rank")
    bars.invert_yaxis()
    whole.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    for bound, style in (
        (one["memory_bytes"], "-"),
        (one["memory_bytes"] - one["reserve_bytes"], ":"),
    ):
        plans.axhline(bound / GIB, color="black", linewidth=1, linestyle=style)
        bars.axvline(bound / GIB, color="black", linewidth=1, linestyle=style)
    return whole
