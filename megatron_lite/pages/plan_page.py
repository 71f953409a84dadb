"""The planning page: the verdict, plans by time and memory, and the memory of every stage.

`plan_page` takes what `tools/plan.py --json` writes. If a verdict also has "details"
(plan/details.py), the page shows these too. So a page can be made of a JSON file.
"""

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


def plan_page(found: Mapping[str, Any]) -> str:
    """Returns the planning page as an HTML document.

    found: {"machine", "verdicts"} as plan/plan_text.py writes them; optional are "notes", a list of
    texts.
    """
    sections = [section for one in found["verdicts"] for section in _sections(one)]
    return document(f"Plan for {found['machine']}", sections, found.get("notes", ()))


def _sections(one: Mapping[str, Any]) -> Iterator[Section]:
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
        ("FLOPs that it adds", f"{100 * best['extra_flops']:.1f} %"),
        ("peak of the fullest rank", f"{_gib(best['peak_bytes'])} GiB, {best['moment']}"),
        ("step", f"{number(best['step_seconds'])} s"),
        ("tokens per second, all GPUs", number(best["tokens_per_second"])),
        ("MFU", f"{100 * best['mfu']:.1f} %"),
    ]
    yield Section(heading, "The command runs the best plan.", facts, shell_lines(best["command"]))
    plans = [*one["plans"], *([one["next_better"]] if one["next_better"] else ())]
    rows = [[plan["layout"], *_figures(plan)] for plan in plans or [best]]
    steps = [
        [f"plan 1 with {each['change']}", *_figures(each)] for each in one.get("neighbours", ())
    ]
    yield Section(
        "Plans by time and memory",
        "The fastest plans come first, then one that does not fit, then what is one step away. The "
        "lines are the memory, and the memory without the reserve.",
        picture=picture(plans_figure, one, best),
        tables=[
            Table(
                "The plans of the picture",
                ("plan", "peak GiB", "step s", "tokens/s", "recomputation"),
                rows + steps,
            )
        ],
    )
    stages = (one.get("details") or {}).get("stages") or [
        {"rank": best["pipeline_rank"], "terms": best["peak_terms"]}
    ]
    yield Section(
        "Memory of the pipeline ranks at their peaks",
        TAGS,
        picture=picture(stages_figure, one, stages),
        tables=[
            Table(
                "The terms of each rank",
                ("rank", "term", "GiB", "tag"),
                [
                    [str(stage["rank"]), term["name"], _gib(term["bytes"]), term["tag"]]
                    for stage in stages
                    for term in stage["terms"]
                    if term["bytes"]
                ],
            ),
            Table(
                "The time of a step, an estimate",
                ("term", "seconds"),
                [[name, number(value)] for name, value in best["step_terms"].items() if value],
            ),
        ],
    )


def plans_figure(one: Mapping[str, Any], best: Mapping[str, Any]) -> Any:
    """Returns the matplotlib figure of time against memory: plans, and layouts of the details."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axis = figure.subplots()
    for label, marker, found in (
        ("other layouts", ".", (one.get("details") or {}).get("layouts", ())),
        ("one step away", "x", one.get("neighbours", ())),
        ("plans", "o", one["plans"]),
        ("best plan", "*", [best]),
    ):
        if found:
            axis.plot(
                [each["step_seconds"] for each in found],
                [each["peak_bytes"] / GIB for each in found],
                linestyle="",
                marker=marker,
                label=label,
            )
    _capacity(axis.axhline, one)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("seconds of a step, estimated")
    axis.set_ylabel("peak of the fullest rank [GiB]")
    axis.legend(frameon=False)
    return figure


def stages_figure(one: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the matplotlib figure of one stacked bar for each pipeline rank."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.3 * len(stages)), layout="constrained")
    axis = figure.subplots()
    ends = [0.0] * len(stages)
    for name in dict.fromkeys(term["name"] for stage in stages for term in stage["terms"]):
        widths = [
            sum(term["bytes"] for term in stage["terms"] if term["name"] == name) / GIB
            for stage in stages
        ]
        places = [str(stage["rank"]) for stage in stages]
        if any(widths):
            axis.barh(places, widths, left=ends, label=printable(name))
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    _capacity(axis.axvline, one)
    axis.set_xlabel("GiB")
    axis.set_ylabel("pipeline rank")
    axis.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _capacity(line: Any, one: Mapping[str, Any]) -> None:
    line(one["memory_bytes"] / GIB, color="black", linewidth=1)
    line((one["memory_bytes"] - one["reserve_bytes"]) / GIB, color="black", linestyle=":")


def _figures(plan: Mapping[str, Any]) -> list[str]:
    return [
        *(_gib(plan["peak_bytes"]), number(plan["step_seconds"])),
        *(number(plan["tokens_per_second"]), shortened(plan.get("recompute_policy", ""), 120)),
    ]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f}"
