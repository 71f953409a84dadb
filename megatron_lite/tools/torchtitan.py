"""Translates the activation checkpointing of torchtitan configs. translators.py has the rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lite.config.policy import LayerAction, Policy, Rule
from megatron_lite.tools.translation import (
    EVERY,
    KEEP,
    MAX_STEP,
    OPERATORS,
    Translation,
    every,
    mapping,
    notes_elsewhere,
    operators,
    require,
    section,
    shown,
    typed,
    without_counterpart,
)

NONE, WHOLE, SELECTIVE, BUDGET = "none", "full", "selective", "memory_budget"
TORCHTITAN_TABLE = "activation_checkpoint"


def from_torchtitan(config: Mapping[str, Any]) -> Translation:
    """Translates the table `activation_checkpoint` of a job config.

    The default of `mode` is selective, and the default option is every 2nd layer. A whole file
    without the table means torchtitan's defaults. `selective_ac_option` 'op' keeps every second
    matmul. torchtitan counts aten.mm alone, so it always rebuilds a linear with a bias; here every
    matmul counts. `memory_budget` needs the table `compile` with `enable`. Here it also compiles
    each layer, see training/compiler.py.
    """
    mapping(config, "torchtitan")
    notes: tuple[str, ...] = ()
    if TORCHTITAN_TABLE not in config and is_torchtitan(config):
        table: Any = {}
        notes = (
            f"torchtitan: the file has no table {TORCHTITAN_TABLE}: this is torchtitan's default",
        )
    else:
        table = section(config, "torchtitan", TORCHTITAN_TABLE)
    given = typed(
        table,
        f"torchtitan: {TORCHTITAN_TABLE}",
        file=config,
        mode=str,
        selective_ac_option=(int, str),
        per_op_sac_force_recompute_mm_shapes_by_fqns=list,
        early_stop=bool,
        memory_budget=(int, float),
        visualize_memory_budget_pareto=bool,
        preserve_rng_state=bool,
        determinism_check=str,
        debug=bool,
    )
    mode = given.get("mode", SELECTIVE)
    require(
        mode in (NONE, WHOLE, SELECTIVE, BUDGET),
        f"torchtitan: mode must be none, full, selective or memory_budget (got {shown(mode)})",
    )
    option = given.get("selective_ac_option", "2")
    shapes = [
        name
        for name in given.get("per_op_sac_force_recompute_mm_shapes_by_fqns", ())
        if name != "moe.router.gate"
    ]
    require(
        not (shapes and mode == SELECTIVE and option == "op"),
        f"torchtitan: per_op_sac_force_recompute_mm_shapes_by_fqns {shown(shapes)} is not "
        "translated: ops(...) tells operators apart, not their shapes",
    )
    notes += without_counterpart(
        "torchtitan",
        given,
        early_stop="a replay leaves out its last matmul unless --no-recompute-tail-skip is given",
        visualize_memory_budget_pareto=(
            "it draws what the compiler could do, and trains no differently"
        ),
        determinism_check="--recompute-verify compares values",
        debug="--recompute-verify names the layer and the tensor that differ",
    )
    if given.get("preserve_rng_state") is False:
        notes += (
            (
                "torchtitan: preserve_rng_state false has no counterpart: replays always restore "
                "the generators"
            ),
        )
    read = (TORCHTITAN_TABLE, "compile") if mode == BUDGET else (TORCHTITAN_TABLE,)
    if mode != BUDGET:
        notes += without_counterpart(
            "torchtitan", given, memory_budget=f"it has no meaning with mode {mode}"
        )
        notes += notes_elsewhere("torchtitan", config, read)
        return Translation(
            Policy((selected("torchtitan", mode, "selective_ac_option", option),)), notes=notes
        )
    compiler = config.get("compile", {})
    require(
        isinstance(compiler, Mapping) and compiler.get("enable") is True,
        "torchtitan: mode memory_budget needs the table compile with enable true: the budget "
        "is torch.compile's",
    )
    budget = given.get("memory_budget", 0.5)
    require(
        0 <= budget <= 1, f"torchtitan: memory_budget must be from 0 to 1 (got {shown(budget)})"
    )
    notes += notes_elsewhere("torchtitan", config, read)
    return Translation(KEEP, activation_memory_budget=float(budget), notes=notes)


def is_torchtitan(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get(TORCHTITAN_TABLE), Mapping) or (
        "job" in config
        and any(
            isinstance(config.get(table), Mapping) for table in ("model", "training", "parallelism")
        )
    )


def selected(system: str, mode: str, key: str, option: object) -> Rule:
    """Returns the rule for a mode of torchtune or torchtitan.

    option: the option of the mode selective. It is a number, maybe as text, or 'op'.
    """
    if mode != SELECTIVE:
        return Rule(layers=EVERY, action=LayerAction(unit=1 if mode == WHOLE else 0))
    if option == "op":
        return operators(OPERATORS)
    if (
        isinstance(option, str)
        and option.isascii()
        and option.isdigit()
        and len(option) <= len(str(MAX_STEP))
    ):
        option = int(option)
    require(
        isinstance(option, int),
        f"{system}: {key} of selective must be 'op' or a number of layers (got {shown(option)})",
    )
    return every(option, f"{system}: {key}")
