"""The plans of a verdict as tables, and the dimensions of a plan's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lite.pages.figures import number
from megatron_lite.pages.markup import Html, element, joined, shortened, table
from megatron_lite.pages.plan_terms import GIB

DIMENSIONS = ("t", "p", "v", "c", "d", "states", "b")
WORDS = {"fits": "good", "tight": "", "does not fit": "bad"}


def sizes_of(plan: Mapping[str, Any], num_gpus: int) -> dict[str, Any]:
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
        "v": _virtual_stages(plan["config"]),
        "c": c,
        "d": num_gpus // (t * p * c),
        "states": states,
        "b": training["micro_batch_size"],
        "chunk": training["loss_chunk_size"],
    }


def _virtual_stages(config: Mapping[str, Any]) -> int:
    """Returns the virtual stages of each pipeline rank."""
    parallel = config["parallel"]
    per_stage = parallel["num_layers_per_virtual_pipeline_stage"]
    if per_stage is None:
        return parallel["num_virtual_stages_per_pipeline_rank"] or 1
    size: int = parallel["pipeline_model_parallel_size"]
    return int(config["model"]["num_layers"]) // (size * int(per_stage))


def layout_text(sizes: Mapping[str, Any]) -> str:
    """Returns the dimensions that `sizes_of` gives as words."""
    virtual = f" with {sizes['v']} virtual stages" if sizes["v"] > 1 else ""
    chunk = f", loss in chunks of {sizes['chunk']} tokens" if sizes["chunk"] else ""
    return (
        f"tensor-parallel {sizes['t']}, pipeline-parallel {sizes['p']}{virtual}, "
        f"context-parallel {sizes['c']}, data-parallel {sizes['d']} ({sizes['states']}), "
        f"micro-batch {sizes['b']}{chunk}"
    )


def several_table(verdicts: Sequence[Mapping[str, Any]]) -> Html:
    """Returns one row for each number of GPUs, with its best plan."""
    rows = []
    for one in verdicts:
        plan = plan_of(one)
        rows.append(
            [
                f"{one['num_gpus']:,}",
                element("b", one["verdict"], class_=WORDS.get(one["verdict"])),
                *(
                    ["", "", ""]
                    if plan is None
                    else [*_peak_and_seconds(plan), number(plan["tokens_per_second"])]
                ),
            ]
        )
    return table(
        ["GPUs", "verdict", "peak GiB", "step s", "tokens/s"],
        rows,
        caption="The best plan for each number of GPUs.",
        class_="figures",
    )


def _peak_and_seconds(plan: Mapping[str, Any]) -> tuple[str, str]:
    """Returns both with two decimals, as the terminal shows them, so that they line up."""
    return f"{plan['peak_bytes'] / GIB:,.2f}", f"{plan['step_seconds']:,.2f}"


def plan_of(one: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the best plan, or the one with the smallest peak if none fits."""
    plans = one["plans"]
    found: Mapping[str, Any] | None = plans[0] if plans else one.get("smallest")
    return found


def plans_tables(one: Mapping[str, Any]) -> Html:
    """Returns the fastest plans and what is one step away; nothing if no plan fits."""
    named = [(str(place), plan) for place, plan in enumerate(one["plans"], start=1)]
    if one.get("next_better"):
        named.append(("next better, does not fit", one["next_better"]))
    rows = []
    for name, plan in named:
        sizes = sizes_of(plan, one["num_gpus"])
        rows.append(
            [
                name,
                *(str(sizes[key]) for key in DIMENSIONS),
                str(sizes["chunk"] or "none"),
                *_peak_and_seconds(plan),
                f"{100 * plan['mfu']:.1f} %",
                shortened(plan["recompute_policy"], 120),
            ]
        )
    if not rows:
        return Html()
    head = ["plan", *DIMENSIONS, "chunk", "peak GiB", "step s", "MFU", "policy"]
    caption = (
        "The fastest plans, and the next better one. t, p, c, d: tensor-, pipeline-, context- and "
        "data-parallel sizes; v: virtual stages; b: micro-batch size."
    )
    parts = [element("h2", "Plans"), table(head, rows, caption=caption, class_="rows")]
    if one.get("neighbours"):
        steps = [
            [
                each["change"],
                "yes" if each["fits"] else "no",
                *_peak_and_seconds(each),
                number(each["tokens_per_second"]),
            ]
            for each in one["neighbours"]
        ]
        head = ["change", "fits", "peak GiB", "step s", "tokens/s"]
        parts.append(table(head, steps, caption="One step away from plan 1.", class_="figures"))
    return joined(parts)
