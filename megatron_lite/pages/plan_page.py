"""The planning page: the verdict, plans by time and memory, and the memory of every stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_lite.config.invocation import shell_lines
from megatron_lite.pages.document import (
    Section,
    Table,
    document,
    number,
    picture,
    printable,
    shortened,
)

GIB = 2**30
TAGS = (
    "exact: the run allocates exactly these bytes. bound: it never holds more. estimate: neither. "
    "All times are estimates."
)
Stages = Sequence[Mapping[str, Any]]  # by pipeline rank: {"rank", "terms"}


def plan_page(found: Mapping[str, Any], stages: Sequence[Stages], notes: Sequence[str] = ()) -> str:
    """Returns the planning page as an HTML document.

    found: what `plan --json` writes. stages: of each verdict, the terms of the ranks of its plan.
    """
    sections = [
        section
        for one, own in zip(found["verdicts"], stages, strict=True)
        for section in _sections(one, own)
    ]
    return document(f"Plan for {found['machine']}", sections, notes)


def _sections(one: Mapping[str, Any], stages: Stages) -> Iterator[Section]:
    facts = [
        ("verdict", one["verdict"]),
        ("memory and reserve", f"{_gib(one['memory_bytes'])}, {_gib(one['reserve_bytes'])} GiB"),
        ("layouts searched", str(one["num_layouts"])),
    ]
    best = one["plans"][0] if one["plans"] else one["smallest"]
    heading = f"{one['num_gpus']} GPUs: {one['verdict']}"
    if best is None:
        yield Section(heading, facts=facts)
        return
    facts += [
        ("layout", best["layout"]),
        ("recomputation", best["recompute_policy"]),
        ("FLOPs that it adds", f"{best['extra_flops']:.1%}"),
        ("peak of the fullest rank", f"{_gib(best['peak_bytes'])} GiB, {best['moment']}"),
        ("step", f"{number(best['step_seconds'])} s"),
        ("tokens per second, all GPUs", number(best["tokens_per_second"])),
        ("MFU", f"{best['mfu']:.1%}"),
    ]
    plans = [*(one["plans"] or [best]), *([one["next_better"]] if one["next_better"] else ())]
    rows = [(plan["layout"], plan, plan["recompute_policy"]) for plan in plans]
    rows += [(f"plan 1 with {near['change']}", near, "") for near in one["neighbours"]]
    yield Section(
        heading,
        "The command runs the best plan. The fastest plans come first, then one that does not fit, "
        f"then what is one step away. {TAGS}",
        facts,
        shell_lines(best["command"]),
        picture(figure, one, best, stages),
        [
            Table(
                "The plans of the picture",
                ("plan", "peak GiB", "step s", "tokens/s", "recomputation"),
                [
                    (
                        *(name, _gib(plan["peak_bytes"]), number(plan["step_seconds"])),
                        *(number(plan["tokens_per_second"]), shortened(policy, 120)),
                    )
                    for name, plan, policy in rows
                ],
            ),
            Table(
                "The peak of each pipeline rank",
                ("rank", "term", "GiB", "tag"),
                [
                    (str(stage["rank"]), term["name"], _gib(term["bytes"]), term["tag"])
                    for stage in stages
                    for term in stage["terms"]
                ],
            ),
            Table(
                "The time of a step, an estimate",
                ("term", "seconds"),
                [(name, number(value)) for name, value in best["step_terms"].items() if value],
            ),
        ],
    )


def figure(one: Mapping[str, Any], best: Mapping[str, Any], stages: Stages) -> Any:
    """Returns the matplotlib figure: plans by time and memory, and a stacked bar for each rank.

    The lines are the memory, and the memory without the reserve.
    """
    from matplotlib.figure import Figure

    whole = Figure(figsize=(11, max(4.0, 1.5 + 0.2 * len(stages))), layout="constrained")
    plans, bars = whole.subplots(1, 2)
    for label, marker, found in (
        ("one step away", "x", one["neighbours"]),
        ("plans", "o", one["plans"]),
        ("best plan", "*", [best]),
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


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f}"
