"""The planning page: the verdict, the memory of every stage, a grid to explore, and a timeline.

`plan_page` takes what `tools/plan.py --json` writes. If a verdict also has "details"
(plan/details.py), the page shows these too. Nothing else of the planner is needed, so a page can be
made of a JSON file from another machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lite.config.command_line import shell_lines
from megatron_lite.pages.bars import NUM_COLORS, Bar, Limits, Part, stacked_bars
from megatron_lite.pages.figures import number, time_unit
from megatron_lite.pages.markup import (
    Html,
    card,
    element,
    joined,
    json_element,
    page,
    shortened,
    table,
)
from megatron_lite.pages.plan_grid import explorer, grid_data, scatter
from megatron_lite.pages.plan_tables import (
    WORDS,
    layout_text,
    plan_of,
    plans_tables,
    several_table,
    sizes_of,
)
from megatron_lite.pages.plan_terms import (
    FORMULAS,
    GIB,
    GIBIBYTES,
    TAGS,
    categories,
    category,
    colors_of,
    hint,
    seconds_text,
)
from megatron_lite.pages.plan_timeline import timeline_chart

STEP_FORMULA = (
    "An estimate: computation, waits and reduction of the pipeline rank that ends last, and the "
    "optimizer step."
)


def plan_page(found: Mapping[str, Any]) -> str:
    """Returns the planning page as an HTML document.

    found: {"machine", "verdicts"} as plan/plan_text.py writes them; optional are "notes", a list of
    texts, and "title".
    """
    verdicts = found["verdicts"]
    title = str(found.get("title") or f"Plan for {found['machine']}")
    charts: dict[str, Any] = {"charts": {}, "marks": {}}
    grids: dict[str, Any] = {}
    sections = [
        _verdict(one, f"v{place}", charts, grids, alone=len(verdicts) == 1)
        for place, one in enumerate(verdicts)
    ]
    return page(
        title,
        element("h1", shortened(title, 120)),
        *(element("p", f"Note: {note}", class_="soft") for note in found.get("notes", ())),
        several_table(verdicts) if len(verdicts) > 1 else Html(),
        *sections,
        _explanations(),
        json_element(charts, "charts"),
        json_element(grids, "grids"),
        scripts=["page.js", "plan.js"],
    )


def _verdict(
    one: Mapping[str, Any], name: str, charts: dict[str, Any], grids: dict[str, Any], *, alone: bool
) -> Html:
    plan, details = plan_of(one), one.get("details") or {}
    parts = [element("h2", f"{one['num_gpus']:,} GPUs")] if not alone else []
    parts.append(_cards(one, plan))
    if plan is None:
        return element("section", *parts)
    parts += [_command(plan), _stages(one, plan, details), plans_tables(one)]
    grid = details.get("grid")
    if grid and grid["cells"]:
        grids[name] = grid_data(one, plan, grid)
        parts += [explorer(one, name, grid), scatter(one, name, grid)]
    if details.get("timeline"):
        parts.append(timeline_chart(one, plan, details["timeline"], name, charts))
    parts.append(_time(plan))
    return element("section", *parts)


def _cards(one: Mapping[str, Any], plan: Mapping[str, Any] | None) -> Html:
    memory, reserve = one["memory_bytes"], one["reserve_bytes"]
    word = element("b", one["verdict"], class_=WORDS.get(one["verdict"]))
    searched = f"{one['num_layouts']:,} layouts searched"
    cards = [card(f"verdict for {one['num_gpus']:,} GPUs", word, searched)]
    if plan is not None:
        free = memory - plan["peak_bytes"]
        cards += [
            card(
                "peak of the fullest rank",
                GIBIBYTES.shown(plan["peak_bytes"]),
                f"{number(free / GIB)} GiB of {number(memory / GIB)} are free"
                if free >= 0
                else f"{number(-free / GIB)} GiB more than there are",
            ),
            card("step", seconds_text(plan["step_seconds"]), "an estimate"),
            card("tokens per second", number(plan["tokens_per_second"]), "all GPUs"),
            card("MFU", f"{100 * plan['mfu']:.1f} %"),
        ]
    cards.append(card("reserve", GIBIBYTES.shown(reserve), "for what no prediction sees"))
    shown = element("ul", *cards, class_="cards")
    if plan is None:
        return shown
    sizes = sizes_of(plan, one["num_gpus"])
    return joined(
        [
            shown,
            element("p", element("b", "Layout: "), layout_text(sizes)),
            element(
                "p",
                element("b", "Recomputation: "),
                element("code", shortened(plan["recompute_policy"])),
                _extra(plan),
            ),
        ]
    )


def _extra(plan: Mapping[str, Any]) -> str:
    return f", adds {100 * plan['extra_flops']:.1f} % FLOPs" if "extra_flops" in plan else ""


def _command(plan: Mapping[str, Any]) -> Html:
    return element(
        "details",
        element("summary", "The command that runs this plan"),
        element("pre", element("code", shell_lines(plan["command"])), tabindex="0"),
    )


def _stages(one: Mapping[str, Any], plan: Mapping[str, Any], details: Mapping[str, Any]) -> Html:
    stages = details.get("stages") or [{"rank": plan["pipeline_rank"], "terms": plan["peak_terms"]}]
    tags = categories(term for stage in stages for term in stage["terms"])
    colors = colors_of(details, plan)
    parts = [Part(name, hint(name, tag), colors[name]) for name, tag in tags.items()]
    bars = []
    for stage in stages:
        held: dict[str, int] = {}
        for term in stage["terms"]:
            held[category(term)] = held.get(category(term), 0) + term["bytes"]
        bars.append(Bar(f"rank {stage['rank']}", [held.get(name, 0) for name in tags]))
    limits = Limits.over(bars, capacity=one["memory_bytes"], reserve=one["reserve_bytes"])
    size = plan["config"]["parallel"]["pipeline_model_parallel_size"]
    shown = "Every pipeline rank" if len(stages) == size else f"{len(stages)} of {size} ranks"
    rows = [
        [
            part.name,
            tags[part.name],
            GIBIBYTES.shown(max(bar.values[place] for bar in bars)),
            FORMULAS.get(part.name, ""),
        ]
        for place, part in enumerate(parts)
    ]
    return joined(
        [
            element("h2", "Memory of the stages at their peaks"),
            element(
                "p",
                f"{shown}. The line is the capacity of {number(one['memory_bytes'] / GIB)} GiB, "
                f"and the hatched area before it the reserve of "
                f"{number(one['reserve_bytes'] / GIB)} GiB. Rank {plan['pipeline_rank']} is the "
                f"fullest: {shortened(str(plan['moment']))}.",
                class_="soft",
            ),
            element("div", stacked_bars(parts, bars, GIBIBYTES, limits), class_="panel"),
            element(
                "details",
                element("summary", "The terms, their tags and their formulas"),
                table(
                    ["term", "tag", "most of a rank", "formula"],
                    rows,
                    caption="exact: the run allocates exactly these bytes. bound: it never holds "
                    "more. estimate: neither.",
                ),
            ),
        ]
    )


def _time(plan: Mapping[str, Any]) -> Html:
    terms = [(name, seconds) for name, seconds in plan["step_terms"].items() if seconds > 0.0]
    unit = time_unit(plan["step_seconds"])
    parts = [Part(name, "An estimate", place % NUM_COLORS) for place, (name, _) in enumerate(terms)]
    bars = [Bar("a step", [seconds for _, seconds in terms])]
    rows = [
        [name, unit.shown(seconds), f"{100 * seconds / plan['step_seconds']:.1f} %"]
        for name, seconds in sorted(terms, key=lambda term: -term[1])
    ]
    return joined(
        [
            element("h2", "Time of a step"),
            element("p", STEP_FORMULA, class_="soft"),
            element("div", stacked_bars(parts, bars, unit), class_="panel"),
            element(
                "details",
                element("summary", "The terms as a table"),
                table(["term", "time", "share"], rows, caption="Estimates.", class_="figures"),
            ),
        ]
    )


def _explanations() -> Html:
    rows = [[tag, text] for tag, text in TAGS.items()]
    return element(
        "details",
        element("summary", "What the tags mean"),
        table(["tag", "meaning"], rows, caption="Each figure of memory has one of these tags."),
    )
