"""The planning page: the verdict, the memory of every stage, a grid to explore, and a timeline.

`plan_page` takes what `tools/plan.py --json` writes. If a verdict also has "details"
(plan/details.py), the page shows these too. Nothing else of the planner is needed, so a page can be
made of a JSON file from another machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lite.pages.bars import NUM_COLORS, Bar, Limits, Part, stacked_bars
from megatron_lite.pages.figures import Scale, Unit, byte_unit, number, time_unit
from megatron_lite.pages.line_chart import LineChart, Mark, Series, charts_data, ticks
from megatron_lite.pages.markup import Html, element, joined, json_element, page, shortened, table

MIB, GIB = 2**20, 2**30
GIBIBYTES = Unit("GiB", GIB)
SLIDERS = {
    "t": "tensor-parallel size",
    "p": "pipeline-parallel size",
    "states": "data parallelism",
    "b": "micro-batch size",
    "policy": "recomputation",
}
WORDS = {"fits": "good", "tight": "", "does not fit": "bad"}
TAGS = {
    "exact": "the run allocates exactly these bytes",
    "bound": "the run never holds more than this",
    "estimate": "an estimate",
}
WORKSPACE = "workspace"
# n is the number of data- and context-parallel ranks, which share the states.
FORMULAS = {
    "weights": "elements of the rank's weights x bytes of the dtype; under FSDP2 1/n of them in "
    "float32",
    "main weights": "4 bytes for each element, beside 16-bit weights; 1/n of it under ZeRO-1",
    "master weights": "4 bytes for each element, beside 16-bit weights; 1/n of it under ZeRO-1",
    "gradients": "4 bytes for each element, in whole buckets; 1/n of it under FSDP2",
    "optimizer states": "the update rule's float32 states (AdamW: two for each element); 1/n of it "
    "under ZeRO-1 and FSDP2",
    "rotary tables": "the tables of the rotary embedding, which all layers of a stage share",
    "activations": "the most, over the step, of: kept bytes of the micro-batches in flight + what "
    "one backward rebuilds",
    "activations kept for backward": "the kept bytes of all micro-batches in flight at the peak",
    "activations rebuilt by a replay": "what the running backward has rebuilt at the peak",
    WORKSPACE: "the tensors that the running operation holds only while it runs",
}
STATES = ("weights", "main weights", "master weights", "gradients", "optimizer states")
STEP_FORMULA = (
    "An estimate: computation, waits and reduction of the pipeline rank that ends last, and the "
    "optimizer step."
)


def plan_page(found: Mapping[str, Any]) -> str:
    """Returns the planning page as an HTML document.

    found: {"machine", "verdicts"} as plan/report.py writes them; optional are "notes", a list of
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
        _several(verdicts) if len(verdicts) > 1 else Html(),
        *sections,
        _explanations(),
        json_element(charts, "charts"),
        json_element(grids, "grids"),
        scripts=["page.js", "plan.js"],
    )


def _several(verdicts: Sequence[Mapping[str, Any]]) -> Html:
    rows = []
    for one in verdicts:
        plan = _plan_of(one)
        rows.append(
            [
                f"{one['num_gpus']:,}",
                element("b", one["verdict"], class_=WORDS.get(one["verdict"])),
                *(
                    ["", "", ""]
                    if plan is None
                    else [
                        number(plan["peak_bytes"] / GIB),
                        number(plan["step_seconds"]),
                        number(plan["tokens_per_second"]),
                    ]
                ),
            ]
        )
    return table(
        ["GPUs", "verdict", "peak GiB", "step s", "tokens/s"],
        rows,
        caption="The best plan for each number of GPUs.",
        class_="figures",
    )


def _plan_of(one: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the best plan, or the one with the smallest peak if none fits."""
    plans = one["plans"]
    found: Mapping[str, Any] | None = plans[0] if plans else one.get("smallest")
    return found


def _verdict(
    one: Mapping[str, Any], name: str, charts: dict[str, Any], grids: dict[str, Any], *, alone: bool
) -> Html:
    plan, details = _plan_of(one), one.get("details") or {}
    parts = [element("h2", f"{one['num_gpus']:,} GPUs")] if not alone else []
    parts.append(_cards(one, plan))
    if plan is None:
        return element("section", *parts)
    parts += [_command(plan), _stages(one, plan, details), _plans(one)]
    grid = details.get("grid")
    if grid and grid["cells"]:
        grids[name] = _grid_data(one, plan, grid)
        parts += [_explorer(one, name, grid), _scatter(one, name, grid)]
    if details.get("timeline"):
        parts.append(_timeline(one, plan, details["timeline"], name, charts))
    parts.append(_time(plan))
    return element("section", *parts)


def _cards(one: Mapping[str, Any], plan: Mapping[str, Any] | None) -> Html:
    memory, reserve = one["memory_bytes"], one["reserve_bytes"]
    word = element("b", one["verdict"], class_=WORDS.get(one["verdict"]))
    searched = f"{one['num_layouts']:,} layouts searched"
    cards = [_card(f"verdict for {one['num_gpus']:,} GPUs", word, searched)]
    if plan is not None:
        free = memory - plan["peak_bytes"]
        cards += [
            _card(
                "peak of the fullest rank",
                GIBIBYTES.shown(plan["peak_bytes"]),
                f"{number(free / GIB)} GiB of {number(memory / GIB)} are free"
                if free >= 0
                else f"{number(-free / GIB)} GiB more than there are",
            ),
            _card("step", _seconds(plan["step_seconds"]), "an estimate"),
            _card("tokens per second", number(plan["tokens_per_second"]), "all GPUs"),
            _card("MFU", f"{100 * plan['mfu']:.1f} %"),
        ]
    cards.append(_card("reserve", GIBIBYTES.shown(reserve), "for what no prediction sees"))
    shown = element("ul", *cards, class_="cards")
    if plan is None:
        return shown
    sizes = _sizes(plan, one["num_gpus"])
    return joined(
        [
            shown,
            element("p", element("b", "Layout: "), _layout(sizes)),
            element(
                "p",
                element("b", "Recomputation: "),
                element("code", shortened(plan["recompute_policy"])),
                _extra(plan),
            ),
        ]
    )


def _card(name: str, value: str, note: str = "") -> Html:
    whole = value if isinstance(value, Html) else element("b", value)
    return element("li", element("span", name), whole, element("small", note) if note else "")


def _seconds(seconds: float) -> str:
    return time_unit(seconds).shown(seconds)


def _extra(plan: Mapping[str, Any]) -> str:
    return f", adds {100 * plan['extra_flops']:.1f} % FLOPs" if "extra_flops" in plan else ""


def _sizes(plan: Mapping[str, Any], num_gpus: int) -> dict[str, Any]:
    """Returns the dimensions of a plan's layout by their short names."""
    parallel = plan["config"]["parallel"]
    t, p, c = (
        parallel[f"{axis}_parallel_size"] for axis in ("tensor_model", "pipeline_model", "context")
    )
    data = plan["config"]["data_parallel"]
    states = "replicated"
    if data["use_torch_fsdp2"]:
        states = "FSDP2"
    elif data["use_distributed_optimizer"]:
        states = "ZeRO-1"
    training = plan["config"]["training"]
    return {
        "t": t,
        "p": p,
        "c": c,
        "d": num_gpus // (t * p * c),
        "states": states,
        "b": training["micro_batch_size"],
        "chunk": training["loss_chunk_size"],
    }


def _layout(sizes: Mapping[str, Any]) -> str:
    chunk = f", loss in chunks of {sizes['chunk']} tokens" if sizes["chunk"] else ""
    return (
        f"tensor-parallel {sizes['t']}, pipeline-parallel {sizes['p']}, context-parallel "
        f"{sizes['c']}, data-parallel {sizes['d']} ({sizes['states']}), micro-batch {sizes['b']}"
        f"{chunk}"
    )


def _command(plan: Mapping[str, Any]) -> Html:
    words = [f"'{word}'" if " " in word or ";" in word else word for word in plan["command"]]
    return element(
        "details",
        element("summary", "The command that runs this plan"),
        element("pre", element("code", " ".join(words)), tabindex="0"),
    )


def _stages(one: Mapping[str, Any], plan: Mapping[str, Any], details: Mapping[str, Any]) -> Html:
    stages = details.get("stages") or [{"rank": plan["pipeline_rank"], "terms": plan["peak_terms"]}]
    names: dict[tuple[str, str], None] = {}
    for stage in stages:
        names |= {_category(term): None for term in stage["terms"] if term["bytes"]}
    colors = _colors(details, plan)
    parts = [Part(name, _hint(name, tag), colors[name]) for name, tag in names]
    bars = []
    for stage in stages:
        held: dict[tuple[str, str], int] = {}
        for term in stage["terms"]:
            held[_category(term)] = held.get(_category(term), 0) + term["bytes"]
        bars.append(Bar(f"rank {stage['rank']}", [held.get(name, 0) for name in names]))
    limits = Limits.over(bars, capacity=one["memory_bytes"], reserve=one["reserve_bytes"])
    size = plan["config"]["parallel"]["pipeline_model_parallel_size"]
    shown = "Every pipeline rank" if len(stages) == size else f"{len(stages)} of {size} ranks"
    rows = [
        [
            part.name,
            tag,
            GIBIBYTES.shown(max(bar.values[place] for bar in bars)),
            FORMULAS.get(part.name, ""),
        ]
        for place, (part, (_, tag)) in enumerate(zip(parts, names, strict=True))
    ]
    return joined(
        [
            element("h2", "Memory of the stages at their peaks"),
            element(
                "p",
                f"{shown}. The line is the capacity of {number(one['memory_bytes'] / GIB)} GiB, "
                f"and the hatched area before it the reserve of "
                f"{number(one['reserve_bytes'] / GIB)} GiB.",
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


def _colors(details: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, int]:
    """Returns the colour of each term, the same in all figures of a verdict."""
    stages = [*details.get("stages", ()), {"terms": plan["peak_terms"]}]
    names = [_category(term)[0] for stage in stages for term in stage["terms"] if term["bytes"]]
    names += [name for name, _ in details.get("grid", {}).get("terms", ())]
    return {name: place % NUM_COLORS for place, name in enumerate(dict.fromkeys(names))}


def _category(term: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the name and the tag under which a term is drawn.

    Workspaces of different operations, such as "workspace of the loss", are one category.
    """
    name = str(term["name"])
    return (WORKSPACE if name.startswith(WORKSPACE) else name), str(term["tag"])


def _hint(name: str, tag: str) -> str:
    formula = f" {FORMULAS[name]}." if name in FORMULAS else ""
    return f"{tag}: {TAGS.get(tag, tag)}.{formula}"


def _plans(one: Mapping[str, Any]) -> Html:
    named = [(str(place), plan) for place, plan in enumerate(one["plans"], start=1)]
    if one.get("next_better"):
        named.append(("next better, does not fit", one["next_better"]))
    rows = []
    for name, plan in named:
        sizes = _sizes(plan, one["num_gpus"])
        rows.append(
            [
                name,
                *(str(sizes[key]) for key in ("t", "p", "c", "d", "states", "b")),
                str(sizes["chunk"] or "none"),
                number(plan["peak_bytes"] / GIB),
                number(plan["step_seconds"]),
                f"{100 * plan['mfu']:.1f} %",
                shortened(plan["recompute_policy"], 80),
            ]
        )
    if not rows:
        return Html()
    head = [
        "plan",
        "t",
        "p",
        "c",
        "d",
        "states",
        "b",
        "chunk",
        "peak GiB",
        "step s",
        "MFU",
        "policy",
    ]
    caption = (
        "The fastest plans, and the next better one. t, p, c, d: tensor-, pipeline-, context- and "
        "data-parallel sizes; b: micro-batch size."
    )
    parts = [element("h2", "Plans"), table(head, rows, caption=caption, class_="plans")]
    if one.get("neighbours"):
        steps = [
            [
                each["change"],
                "yes" if each["fits"] else "no",
                number(each["peak_bytes"] / GIB),
                number(each["step_seconds"]),
                number(each["tokens_per_second"]),
            ]
            for each in one["neighbours"]
        ]
        head = ["change", "fits", "peak GiB", "step s", "tokens/s"]
        parts.append(table(head, steps, caption="One step away from plan 1.", class_="figures"))
    return joined(parts)


def _grid_data(
    one: Mapping[str, Any], plan: Mapping[str, Any], grid: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what plan.js reads: the grid, the limits in MiB, and the hints of the terms."""
    cells = _summaries(grid)
    scales = _scatter_scales(one, cells)
    colors = _colors(one["details"], plan)
    return {
        **grid,
        "capacity": one["memory_bytes"] / MIB,
        "reserve": one["reserve_bytes"] / MIB,
        "hints": [_hint(name, tag) for name, tag in grid["terms"]],
        "colors": [colors[name] for name, _ in grid["terms"]],
        "x": list(scales[0]),
        "y": list(scales[1]),
    }


def _explorer(one: Mapping[str, Any], name: str, grid: Mapping[str, Any]) -> Html:
    rows = []
    for place, (axis, label) in enumerate(SLIDERS.items()):
        values = grid["axes"][axis]
        identifier = f"{name}-{axis}"
        rows.append(
            element(
                "div",
                element("label", label, for_=identifier),
                element(
                    "input",
                    type="range",
                    id=identifier,
                    min=0,
                    max=len(values) - 1,
                    value=max(grid["plan"][place], 0),
                    data_axis=place,
                    disabled=len(values) == 1,
                ),
                element("output", str(values[max(grid["plan"][place], 0)]), for_=identifier),
                class_="slider",
            )
        )
    return joined(
        [
            element("h2", "Other layouts"),
            element(
                "p",
                f"Move the sliders. {len(grid['cells']):,} plans with the context-parallel size "
                "and the loss chunks of the plan were evaluated. The bars are the ranks that can "
                "be the fullest.",
                class_="soft",
            ),
            element(
                "div",
                element("div", *rows, class_="sliders"),
                element("p", class_="result", role="status"),
                element("ul", class_="legend"),
                element("div", class_="bars"),
                element("noscript", "The sliders need JavaScript. The tables do not."),
                class_="panel explorer",
                data_grid=name,
            ),
        ]
    )


def _summaries(grid: Mapping[str, Any]) -> list[tuple[float, float, list[int]]]:
    """Returns the step seconds, the peak in MiB and the place of each cell."""
    return [
        (seconds, max(sum(rank[1:]) for rank in ranks), place)
        for place, seconds, _, ranks in grid["cells"]
    ]


def _scatter_scales(
    one: Mapping[str, Any], cells: Sequence[tuple[float, float, list[int]]]
) -> tuple[Scale, Scale]:
    """Returns the axes: logarithmic seconds, and MiB, without layouts far above the capacity."""
    seconds = [cell[0] for cell in cells]
    capacity = one["memory_bytes"] / MIB
    peaks = [cell[1] for cell in cells]
    most = min(max(peaks), max(3 * capacity, 2 * min(peaks)))
    return (
        Scale(min(seconds) / 1.05, max(seconds) * 1.05, is_log=True),
        Scale(0.0, 1.06 * max(most, capacity)),
    )


def _scatter(one: Mapping[str, Any], name: str, grid: Mapping[str, Any]) -> Html:
    cells = _summaries(grid)
    across, up = _scatter_scales(one, cells)
    capacity = one["memory_bytes"] / MIB
    frontier = pareto(cells)
    chosen = next((cell for cell in cells if cell[2] == grid["plan"]), None)
    drawn = {
        "dots over": [cell for cell in cells if cell[1] > capacity],
        "dots under": [cell for cell in cells if cell[1] <= capacity],
        "dots front": frontier,
    }
    paths = [
        element("path", d=_line_at(up, capacity), class_="capacity-line"),
        element("path", d=_steps(frontier, across, up), class_="front-line"),
        *(
            element("path", d=_dots(points, across, up), class_=style)
            for style, points in drawn.items()
        ),
    ]
    if chosen is not None:
        paths.append(element("path", d=_dots([chosen], across, up), class_="dots chosen"))
    beyond = sum(cell[1] > up.high for cell in cells)
    above = (
        f" {beyond} plans with more than {number(up.high / 1024)} GiB are not drawn."
        if beyond
        else ""
    )
    best = min(cells)
    said = (
        f"{len(cells)} plans, {sum(cell[1] <= capacity for cell in cells)} of which fit into "
        f"{number(capacity / 1024)} GiB. The fastest takes {_seconds(best[0])} a step and "
        f"{number(best[1] / 1024)} GiB."
    )
    keys = [
        ("front", "no other plan is both faster and smaller"),
        ("under", "fits into the card"),
        ("over", "does not fit"),
        ("chosen", "the plan"),
    ]
    return joined(
        [
            element("h2", "Memory against time"),
            element(
                "figure",
                element(
                    "figcaption",
                    element("h3", "peak", element("small", " [GiB] over the time of a step [s]")),
                    element("p", said + above, class_="note"),
                    element(
                        "ul",
                        *(
                            element("li", element("i", class_=f"swatch dots {key}"), text)
                            for key, text in keys
                        ),
                        class_="legend",
                    ),
                ),
                element(
                    "div",
                    element(
                        "svg",
                        *paths,
                        viewBox="0 0 1000 1000",
                        preserveAspectRatio="none",
                        aria_hidden="true",
                    ),
                    *ticks(Scale(up.low / 1024, up.high / 1024), "y"),
                    *ticks(across, "x"),
                    class_="plot tall",
                    role="img",
                    tabindex="0",
                    aria_label=said,
                    data_scatter=name,
                ),
                element("p", "Point at a dot to see its layout.", class_="note", data_point=name),
                class_="chart",
            ),
            _pareto_table(grid, frontier),
        ]
    )


def pareto(cells: Sequence[tuple[float, float, list[int]]]) -> list[tuple[float, float, list[int]]]:
    """Returns the cells than which no other is both faster and smaller, the fastest first."""
    found: list[tuple[float, float, list[int]]] = []
    for cell in sorted(cells, key=lambda cell: cell[:2]):
        if not found or cell[1] < found[-1][1]:
            found.append(cell)
    return found


def _pareto_table(
    grid: Mapping[str, Any], frontier: Sequence[tuple[float, float, list[int]]]
) -> Html:
    rows = [
        [number(seconds), number(mebibytes / 1024)]
        + [str(grid["axes"][axis][index]) for axis, index in zip(SLIDERS, place, strict=True)]
        for seconds, mebibytes, place in frontier
    ]
    return element(
        "details",
        element("summary", f"The {len(rows)} plans on the front"),
        table(
            ["step s", "peak GiB", *SLIDERS],
            rows,
            caption="No other plan of the grid is both faster and smaller.",
        ),
    )


def _at(across: Scale, up: Scale, cell: tuple[float, float, list[int]]) -> str:
    return f"{1000 * across.place(cell[0]):.1f} {1000 * (1 - up.place(cell[1])):.1f}"


def _dots(cells: Sequence[tuple[float, float, list[int]]], across: Scale, up: Scale) -> str:
    return "".join(f"M{_at(across, up, cell)}h0" for cell in cells if cell[1] <= up.high)


def _line_at(up: Scale, value: float) -> str:
    return f"M0 {1000 * (1 - up.place(value)):.1f}H1000"


def _steps(frontier: Sequence[tuple[float, float, list[int]]], across: Scale, up: Scale) -> str:
    """Returns the path of the front.

    Between two points it stays at the higher memory until the time of the slower plan.
    """
    parts: list[str] = []
    for cell in frontier:
        if cell[1] > up.high:
            continue
        x, y = _at(across, up, cell).split()
        parts.append(f"H{x}V{y}" if parts else f"M{x} {y}")
    return "".join(parts)


def _timeline(
    one: Mapping[str, Any],
    plan: Mapping[str, Any],
    timeline: Mapping[str, Any],
    name: str,
    charts: dict[str, Any],
) -> Html:
    """Returns the chart of the fullest rank's memory, and adds its points to `charts`."""
    states = sum(term["bytes"] for term in plan["peak_terms"] if term["name"] in STATES)
    kept = [states + num_bytes for num_bytes in timeline["kept_bytes"]]
    xs = range(1, len(kept) + 1)
    unit = byte_unit(max(*kept, one["memory_bytes"]))
    chart = LineChart(
        title=f"memory of pipeline rank {timeline['rank']}",
        xs=xs,
        series=[
            Series(name="held after the action", values=kept),
            Series(name="weights, gradients and states", values=[states] * len(kept)),
            Series(name="predicted peak", values=[plan["peak_bytes"]] * len(kept)),
            Series(name="capacity", values=[one["memory_bytes"]] * len(kept)),
        ],
        unit=unit,
        from_zero=True,
        axis="action",
    )
    marks = [
        Mark(x=x, kind="action", text=f"{action}, micro-batches in flight: {count}")
        for x, action, count in zip(xs, timeline["actions"], timeline["in_flight"], strict=True)
    ]
    span = (1, max(len(kept), 2))
    data = charts_data({f"{name}-timeline": chart}, marks, span, name)
    charts["charts"] |= data["charts"]
    charts["marks"] |= data["marks"]
    shorter = (
        f" The chart has {timeline['drawn']} of the step's {timeline['num_microbatches']} "
        "micro-batches, since the middle of a schedule repeats itself."
        if timeline["drawn"] < timeline["num_microbatches"]
        else ""
    )
    rows = [[str(mark.x), mark.text, unit.shown(kept[mark.x - 1])] for mark in marks[:200]]
    return joined(
        [
            element("h2", "The fullest rank over a step"),
            element(
                "p",
                "Each action is the forward (F) or backward (B) of a micro-batch. The curve is "
                "what the rank holds when the action has ended; the peak is inside a backward."
                + shorter,
                class_="soft",
            ),
            element("div", chart.html(f"{name}-timeline", [], span), class_="charts one"),
            element("p", class_="where", data_where=name, hidden=True),
            element(
                "details",
                element("summary", "The actions as a table"),
                table(["number", "action", "held"], rows, caption="The actions of the chart."),
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
