"""Translates the activation checkpointing of torchtune, torchtitan, DeepSpeed and OSLO configs.

Each `from_...` takes that system's own config, the whole of it or its part on activation
checkpointing. It returns a Translation, whose `flags` are the flags to give here. A note names
every value that has no counterpart. A config that the original refuses raises ValueError. A value
of the wrong type does so too, and an unknown key in that part, which most of the systems ignore
silently. Modalities is in modalities.py. `docs/coming-from.md` has a table for each system; the
command is `tools/translate_recompute.py`.

Two rules hold for all systems. "Every n-th layer" begins with the n-th layer: n = 2 selects layers
1, 3, 5 of a stage, by their number from 0. torchtune, torchtitan and Modalities count calls with
one counter per process instead, which continues in a second model. And a replay always draws the
dropout masks of its forward, even if the original would not restore the generators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron_lite.config.policy import LayerAction, Policy, Rule
from megatron_lite.tools.modalities import from_modalities, is_modalities
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
    resolved,
    section,
    shown,
    typed,
    without_counterpart,
)

NONE, WHOLE, SELECTIVE, BUDGET = "none", "full", "selective", "memory_budget"
TORCHTUNE_KEYS: dict[str, Any] = {
    "enable_activation_checkpointing": bool,
    "ac_mode": (str, type(None)),
    "ac_option": (int, str, type(None)),
    "enable_activation_offloading": bool,
    "activation_offloading_use_streams": bool,
    "custom_sharded_layers": (list, type(None)),
    "memory_efficient_wrapping": bool,
    "memory_efficient_fsdp_wrap": bool,
}
EMBEDDING_AND_OUTPUT = ("tok_embeddings", "output")  # names in torchtune, maybe after "decoder."
WRAPPING = ("memory_efficient_wrapping", "memory_efficient_fsdp_wrap", "custom_sharded_layers")
TORCHTITAN_TABLE = "activation_checkpoint"
SECTION = "activation_checkpointing"  # in configs of DeepSpeed and OSLO
DEEPSPEED_KEYS = (
    "partition_activations",
    "cpu_checkpointing",
    "contiguous_memory_optimization",
    "number_checkpoints",
    "synchronize_checkpoint_boundary",
    "profile",
)
DEEPSPEED_FILE = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
)
RECOMPUTATION = re.compile(r"(^|_)ac(_|$)|activation")
OSLO_KEYS = ("partitioned_checkpointing", "cpu_checkpointing", "contiguous_checkpointing")
OSLO_FILE = (
    "model_parallelism",
    "data_parallelism",
    "tensor_parallelism",
    "sequence_parallelism",
    "pipeline_parallelism",
    "expert_parallelism",
    "kernel_fusion",
    "lazy_initialization",
    "tensor_parallel_size",
)
OSLO_SIZES = (
    ("model_parallelism", "tensor_parallel_size"),
    ("tensor_parallelism", "parallel_size"),
)


def from_torchtune(recipe: Mapping[str, Any]) -> Translation:
    """Translates a recipe's keys on activation checkpointing, offloading and wrapping.

    `TORCHTUNE_KEYS` lists the keys. They may also be in a section `training`, and those of
    memory-efficient wrapping in a section `fsdp`. If both `enable_activation_checkpointing` and
    `ac_mode` are set, torchtune applies neither; here `ac_mode` decides. torchtune never
    implemented its `ac_option` 'op'; here it means the same as in torchtitan. Offloading moves what
    every layer saves to host memory, whether the layer is rebuilt or not.
    """
    place, part = _torchtune_part(mapping(recipe, "torchtune"))
    found = {key: value for key, value in part.items() if key in TORCHTUNE_KEYS}
    unknown = [
        key
        for key in part
        if isinstance(key, str) and key not in found and RECOMPUTATION.search(key)
    ]
    require(
        not unknown,
        f"torchtune: unknown key {shown(unknown[0] if unknown else None)} (known: "
        f"{', '.join(TORCHTUNE_KEYS)})",
    )
    fsdp = part.get("fsdp")
    inner = {key: fsdp[key] for key in WRAPPING if key in fsdp} if isinstance(fsdp, Mapping) else {}
    given = typed({**inner, **found}, "torchtune", file=recipe, **TORCHTUNE_KEYS)
    read = [f"{place}{key}" for key in found] + [f"{place}fsdp.{key}" for key in inner]

    enabled, mode = given.get("enable_activation_checkpointing", False), given.get("ac_mode")
    require(
        mode in (None, NONE, WHOLE, SELECTIVE),
        f"torchtune: ac_mode must be none, full or selective (got {shown(mode)})",
    )
    require(
        not (enabled and mode == NONE),
        "torchtune: enable_activation_checkpointing true and ac_mode none contradict each "
        "other: leave one of them out",
    )
    mode = mode or (WHOLE if enabled else NONE)
    notes = without_counterpart(
        "torchtune",
        given,
        activation_offloading_use_streams="copies overlap wherever the device can",
    )
    if enabled and given.get("ac_mode") is not None:
        notes += (
            f"torchtune: ac_mode {mode} beside enable_activation_checkpointing true makes "
            "torchtune apply neither; here ac_mode says how",
        )
    if given.get("ac_option") is not None and mode != SELECTIVE:
        notes += (f"torchtune: ac_option has no meaning with ac_mode {mode}",)
    wrapped, wrapping_notes = _memory_efficient_wrapping(given)
    notes += (*wrapping_notes, *notes_elsewhere("torchtune", recipe, read))
    offloaded = given.get("enable_activation_offloading", False)
    require(
        enabled or not offloaded,
        "torchtune: enable_activation_offloading needs enable_activation_checkpointing true",
    )
    rules = (_selected("torchtune", mode, "ac_option", given.get("ac_option")),)
    if offloaded:
        others = (
            (Rule(layers=EVERY, action=LayerAction(), store="host"),)
            if rules[0].layers != EVERY
            else ()
        )
        rules = (replace(rules[0], store="host"), *others)
    return Translation(Policy(rules), notes=notes, fsdp_memory_efficient_wrapping=wrapped)


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
    if TORCHTITAN_TABLE not in config and _is_torchtitan(config):
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
            Policy((_selected("torchtitan", mode, "selective_ac_option", option),)), notes=notes
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


def from_deepspeed(config: Mapping[str, Any], *, tp_size: int | None = None) -> Translation:
    """Translates the section `activation_checkpointing` of a DeepSpeed config.

    tp_size: the tensor-parallel size. Partitioning needs it, unless the file has it.
    The section decides where the input of each recomputed unit is stored. In DeepSpeed the calling
    code decides which layers are units; here every layer is one. Three things differ:

    DeepSpeed partitions in place, so in evaluation the caller is left with a shard. Here the
    caller's tensor never changes.
    DeepSpeed's contiguous memory is a list of tensors that overflows unless `reset()` is called.
    Here it is one buffer sized by the plan, without `number_checkpoints`.
    Partitioning over one rank does nothing in DeepSpeed. Here it is an error.
    """
    given = typed(
        section(config, "deepspeed", SECTION),
        f"deepspeed: {SECTION}",
        file=config,
        partition_activations=bool,
        cpu_checkpointing=bool,
        contiguous_memory_optimization=bool,
        number_checkpoints=(int, type(None)),
        synchronize_checkpoint_boundary=bool,
        profile=bool,
    )
    count = given.get("number_checkpoints")
    require(
        count is None or count >= 1,
        f"deepspeed: number_checkpoints must be at least 1 or null (got {shown(count)})",
    )
    notes = without_counterpart(
        "deepspeed",
        given,
        number_checkpoints="the buffer is sized by the plan",
        synchronize_checkpoint_boundary="nothing waits for the device within a step",
        profile="--memory-timeline shows the replays of a step",
    )
    size = _size_of_file("deepspeed", config, (("tensor_parallel", "autotp_size"),))
    notes += notes_elsewhere("deepspeed", config, (SECTION,))
    return _stored("deepspeed", given, DEEPSPEED_KEYS[:3], tp_size, size, notes)


def from_oslo(config: Mapping[str, Any], *, tp_size: int | None = None) -> Translation:
    """Translates the section `activation_checkpointing` of an OSLO config.

    tp_size: the tensor-parallel size. Partitioning needs it, unless the file has it.
    Without `enable` nothing is rebuilt. OSLO partitions in place, and its contiguous memory is a
    list of tensors: see `from_deepspeed` for the difference.
    """
    given = typed(
        section(config, "oslo", SECTION),
        f"oslo: {SECTION}",
        file=config,
        enable=bool,
        **dict.fromkeys(OSLO_KEYS, bool),
    )
    notes = notes_elsewhere("oslo", config, (SECTION,))
    size = _size_of_file("oslo", config, OSLO_SIZES)
    if given.get("enable", False):
        return _stored("oslo", given, OSLO_KEYS, tp_size, size, notes)
    idle = tuple(
        f"oslo: {name} does nothing without enable true" for name in OSLO_KEYS if given.get(name)
    )
    return Translation(KEEP, notes=(*idle, *notes))


# The translation of each system's config. Those in PARTITIONING take `tp_size`, that of Modalities
# takes `component`.
PARTITIONING: dict[str, Callable[..., Translation]] = {
    "deepspeed": from_deepspeed,
    "oslo": from_oslo,
}
SYSTEMS: dict[str, Callable[..., Translation]] = {
    "torchtune": from_torchtune,
    "torchtitan": from_torchtitan,
    "modalities": from_modalities,
    **PARTITIONING,
}
# The functions that return whether a config is clearly one of a system.
RECOGNITION: dict[str, Callable[[Any], bool]] = {
    "torchtune": lambda config: _is_torchtune(config),
    "torchtitan": lambda config: _is_torchtitan(config),
    "modalities": is_modalities,
    "deepspeed": lambda config: _is_of_section(config, DEEPSPEED_FILE, DEEPSPEED_KEYS),
    "oslo": lambda config: _is_of_section(config, OSLO_FILE, ("enable", *OSLO_KEYS)),
}


def systems_of(config: Any) -> tuple[str, ...]:
    """Returns the systems whose config this may be, by the keys that only they have.

    The result is empty if no key decides.
    """
    if not isinstance(config, Mapping):
        return ()
    found = tuple(system for system, is_one in RECOGNITION.items() if is_one(config))
    undecided = not found and isinstance(config.get(SECTION), Mapping)
    return ("deepspeed", "oslo") if undecided else found


def _is_torchtune(config: Mapping[str, Any]) -> bool:
    components = [
        value.get("_component_") for value in config.values() if isinstance(value, Mapping)
    ]
    return any(
        isinstance(name, str) and name.startswith("torchtune.") for name in components
    ) or not TORCHTUNE_KEYS.keys().isdisjoint(_torchtune_part(config)[1])


def _torchtune_part(recipe: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns the prefix of the keys' places in a recipe, and the section that holds the keys."""
    training = recipe.get("training")
    if (
        TORCHTUNE_KEYS.keys().isdisjoint(recipe)
        and isinstance(training, Mapping)
        and not TORCHTUNE_KEYS.keys().isdisjoint(training)
    ):
        return "training.", training
    return "", recipe


def _is_torchtitan(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get(TORCHTITAN_TABLE), Mapping) or (
        "job" in config
        and any(
            isinstance(config.get(table), Mapping) for table in ("model", "training", "parallelism")
        )
    )


def _is_of_section(
    config: Mapping[str, Any], of_file: tuple[str, ...], of_section: tuple[str, ...]
) -> bool:
    """Returns whether a config has keys of DeepSpeed or of OSLO that the other system lacks."""
    inside = config.get(SECTION)
    keys = set(of_section) - {"cpu_checkpointing"}
    return not set(of_file).isdisjoint(config) or (
        isinstance(inside, Mapping) and not keys.isdisjoint(inside)
    )


def _memory_efficient_wrapping(given: Mapping[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Returns whether token embedding and output projection are FSDP units of their own, and notes.

    The notes name the wrapped layers of the file that have no counterpart.
    """
    names = given.get("custom_sharded_layers") or []
    known = [
        name
        for name in names
        if isinstance(name, str) and name.removeprefix("decoder.") in EMBEDDING_AND_OUTPUT
    ]
    others = [name for name in names if name not in known]
    notes = []
    if others:
        notes.append(
            f"torchtune: custom_sharded_layers {shown(others)} has no counterpart: only token "
            "embedding and output projection can be units of their own"
        )
    if len(known) == 1:
        notes.append(
            f"torchtune: custom_sharded_layers has {known[0]} alone; "
            "--fsdp-memory-efficient-wrapping is for token embedding and output projection"
        )
    return bool(known) or any(given.get(key, False) for key in WRAPPING[:2]), tuple(notes)


def _selected(system: str, mode: str, key: str, option: object) -> Rule:
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


def _size_of_file(
    system: str, config: Mapping[str, Any], places: tuple[tuple[str, str], ...]
) -> tuple[str, int] | None:
    """Returns the tensor-parallel size of a file with the key that has it, or None.

    A section with `enable` false does not count. Raises ValueError if the file has different sizes.
    """
    candidates: list[tuple[str, Any]] = (
        [("tensor_parallel_size", config["tensor_parallel_size"])]
        if "tensor_parallel_size" in config
        else []
    )
    for name, key in places:
        part = config.get(name)
        if isinstance(part, Mapping) and key in part and part.get("enable") is not False:
            candidates.append((f"{name}.{key}", part[key]))
    sizes = {place: resolved(value, config, f"{system}: {place}") for place, value in candidates}
    for place, size in sizes.items():
        require(
            type(size) is int and size >= 1,
            f"{system}: {place} must be a number of ranks from 1 (got {shown(size)})",
        )
    require(
        len(set(sizes.values())) < 2,
        f"{system}: {' and '.join(sizes)} contradict each other: {shown(list(sizes.values()))}",
    )
    return next(iter(sizes.items()), None)


def _stored(
    system: str,
    given: Mapping[str, Any],
    names: tuple[str, ...],
    tp_size: int | None,
    of_file: tuple[str, int] | None,
    notes: tuple[str, ...],
) -> Translation:
    """Returns the translation in which every layer is a unit.

    names: the keys for keeping 1/t of a unit's input on each rank, for host memory, and for one
        contiguous buffer.
    tp_size: the tensor-parallel size that the caller gave. of_file: the key and size of the file.
    """
    split, host = (given.get(name, False) for name in (names[0], "cpu_checkpointing"))
    contiguous = given.get(names[2], False)
    require(
        tp_size is None or tp_size >= 1,
        f"the tensor-parallel size must be at least 1 (got {tp_size})",
    )
    if of_file is not None:
        require(
            tp_size in (None, of_file[1]),
            f"{system}: the tensor-parallel size {tp_size} contradicts {of_file[0]} "
            f"{of_file[1]} of the file: leave one of them out",
        )
    require(split or not contiguous, f"{system}: {names[2]} needs {names[0]} true")
    size = tp_size if of_file is None else of_file[1]
    require(
        not split or size is not None,
        f"{system}: {names[0]} splits inputs over tensor-parallel ranks, and the file does "
        "not say how many there are: give --tp N",
    )
    where = "" if of_file is None else f" in {of_file[0]}"
    require(
        not split or size != 1,
        f"{system}: {names[0]} needs a tensor-parallel size > 1 (got 1{where}): set it to "
        "false, since one rank has nobody to share an input with",
    )
    store = (
        "+".join(word for word, wanted in (("split", split), ("host", host)) if wanted) or "device"
    )
    return Translation(
        Policy((Rule(layers=EVERY, action=LayerAction(unit=1), store=store),)),
        contiguous,
        notes=notes,
        tensor_model_parallel_size=of_file[1] if split and of_file is not None else None,
    )
