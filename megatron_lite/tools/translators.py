"""Translates other systems' activation checkpointing. Modalities has a file of its own.

Each `from_...` takes that system's own config, the whole of it or its part on activation
checkpointing. It returns a Translation, whose `flags` are the flags to give here. A note names
every value that has no counterpart. A config that the original refuses raises ValueError. A value
of the wrong type does so too, and an unknown key in that part, which most of the systems ignore
silently. `docs/coming-from.md` has a table for each system; the command is
`tools/translate_recompute.py`.

Two rules hold for all systems. "Every n-th layer" begins with the n-th layer: n = 2 selects layers
1, 3, 5 of a stage, by their number from 0. torchtune, torchtitan and Modalities count calls with
one counter per process instead, which continues in a second model. And a replay always draws the
dropout masks of its forward, even if the original would not restore the generators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from megatron_lite.config.policy import Rule
from megatron_lite.tools.modalities import from_modalities, is_modalities
from megatron_lite.tools.translation import (
    EVERY,
    MAX_STEP,
    OPERATORS,
    ConfigKey,
    ConfigReader,
    Translation,
    operators,
    shown,
    unit,
)

NONE, WHOLE, SELECTIVE, BUDGET = "none", "full", "selective", "memory_budget"
FLAG = ConfigKey((bool,))

TORCHTUNE = {
    "enable_activation_checkpointing": FLAG,
    "ac_mode": ConfigKey((str, None)),
    "ac_option": ConfigKey((int, str, None)),
    "enable_activation_offloading": FLAG,
    "activation_offloading_use_streams": ConfigKey(
        (bool,), "copies overlap wherever the device can"
    ),
    "custom_sharded_layers": ConfigKey((list, None)),
    "memory_efficient_wrapping": FLAG,
    "memory_efficient_fsdp_wrap": FLAG,
}
EMBEDDING_AND_OUTPUT = ("tok_embeddings", "output")  # names in torchtune, maybe after "decoder."
WRAPPING = ("memory_efficient_wrapping", "memory_efficient_fsdp_wrap", "custom_sharded_layers")
RECOMPUTATION = re.compile(r"(^|_)ac(_|$)|activation")

TITAN_TABLE, MM_SHAPES = "activation_checkpoint", "per_op_sac_force_recompute_mm_shapes_by_fqns"
TORCHTITAN = {
    "mode": ConfigKey((str,)),
    "selective_ac_option": ConfigKey((int, str)),
    MM_SHAPES: ConfigKey((list,)),
    "early_stop": ConfigKey(
        (bool,), "a replay leaves out its last matmul unless --no-recompute-tail-skip is given"
    ),
    "memory_budget": ConfigKey((int, float)),
    "visualize_memory_budget_pareto": ConfigKey(
        (bool,), "it draws what the compiler could do, and trains no differently"
    ),
    "preserve_rng_state": FLAG,
    "determinism_check": ConfigKey((str,), "--recompute-verify compares values"),
    "debug": ConfigKey((bool,), "--recompute-verify names the layer and the tensor that differ"),
}

SECTION = "activation_checkpointing"  # in configs of DeepSpeed and OSLO


class Partitioning(NamedTuple):
    """A system whose section SECTION decides where the input of each recomputed unit is stored.

    keys: those of the section. split, contiguous: the keys for keeping 1/t of an input on each
        rank, and for one contiguous buffer.
    sizes: the sections and keys that may have the tensor-parallel size.
    file: keys of a whole file that other systems lack.
    """

    keys: Mapping[str, ConfigKey]
    split: str
    contiguous: str
    sizes: tuple[tuple[str, str], ...]
    file: tuple[str, ...]


PARTITIONING = {
    "deepspeed": Partitioning(
        {
            "partition_activations": FLAG,
            "cpu_checkpointing": FLAG,
            "contiguous_memory_optimization": FLAG,
            "number_checkpoints": ConfigKey((int, None), "the buffer is sized by the plan"),
            "synchronize_checkpoint_boundary": ConfigKey(
                (bool,), "nothing waits for the device within a step"
            ),
            "profile": ConfigKey((bool,), "--memory-timeline shows the replays of a step"),
        },
        "partition_activations",
        "contiguous_memory_optimization",
        (("tensor_parallel", "autotp_size"),),
        (
            *("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"),
            *("steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer"),
        ),
    ),
    "oslo": Partitioning(
        {
            "enable": FLAG,
            "partitioned_checkpointing": FLAG,
            "cpu_checkpointing": FLAG,
            "contiguous_checkpointing": FLAG,
        },
        "partitioned_checkpointing",
        "contiguous_checkpointing",
        (("model_parallelism", "tensor_parallel_size"), ("tensor_parallelism", "parallel_size")),
        (
            *("model_parallelism", "data_parallelism", "tensor_parallelism"),
            *("sequence_parallelism", "pipeline_parallelism", "expert_parallelism"),
            *("kernel_fusion", "lazy_initialization", "tensor_parallel_size"),
        ),
    ),
}


def from_torchtune(recipe: Mapping[str, Any]) -> Translation:
    """Translates a recipe's keys on activation checkpointing, offloading and wrapping.

    `TORCHTUNE` lists the keys. They may also be in a section `training`, and those of
    memory-efficient wrapping in a section `fsdp`. If both `enable_activation_checkpointing` and
    `ac_mode` are set, torchtune applies neither; here `ac_mode` decides. torchtune never
    implemented its `ac_option` 'op'; here it means the same as in torchtitan. Offloading moves what
    every layer saves to host memory, whether the layer is rebuilt or not.
    """
    reader = ConfigReader("torchtune", recipe)
    place, part = _torchtune_part(recipe)
    own = {
        key: value
        for key, value in part.items()
        if key in TORCHTUNE or (isinstance(key, str) and RECOMPUTATION.search(key))
    }
    fsdp = part.get("fsdp")
    inner = {key: fsdp[key] for key in WRAPPING if key in fsdp} if isinstance(fsdp, Mapping) else {}
    given = reader.values({**inner, **own}, TORCHTUNE)
    enabled, mode = given.get("enable_activation_checkpointing", False), given.get("ac_mode")
    reader.require(
        mode in (None, NONE, WHOLE, SELECTIVE),
        f"ac_mode must be none, full or selective (got {shown(mode)})",
    )
    reader.require(
        not (enabled and mode == NONE),
        "enable_activation_checkpointing true and ac_mode none contradict each other: leave one of "
        "them out",
    )
    if enabled and mode is not None:
        reader.note(
            f"ac_mode {mode} beside enable_activation_checkpointing true makes torchtune apply "
            "neither; here ac_mode says how"
        )
    mode, option = mode or (WHOLE if enabled else NONE), given.get("ac_option")
    if option is not None and mode != SELECTIVE:
        reader.note(f"ac_option has no meaning with ac_mode {mode}")
    wrapped = _memory_efficient_wrapping(reader, given)
    reader.note_elsewhere(
        [f"{place}{key}" for key in own] + [f"{place}fsdp.{key}" for key in inner]
    )
    offloaded = given.get("enable_activation_offloading", False)
    reader.require(
        enabled or not offloaded,
        "enable_activation_offloading needs enable_activation_checkpointing true",
    )
    rules = [_selected(reader, mode, "ac_option", option)]
    if offloaded:
        others = [unit(0, "host")] if rules[0].layers != EVERY else []
        rules = [replace(rules[0], store="host"), *others]
    return reader.result(*rules, fsdp_memory_efficient_wrapping=wrapped)


def from_torchtitan(config: Mapping[str, Any]) -> Translation:
    """Translates the table `activation_checkpoint` of a job config.

    The default of `mode` is selective, and the default option is every 2nd layer. A whole file
    without the table means torchtitan's defaults. `selective_ac_option` 'op' keeps every second
    matmul. torchtitan counts aten.mm alone, so it always rebuilds a linear with a bias; here every
    matmul counts. `memory_budget` needs the table `compile` with `enable`. Here it also compiles
    each layer, see training/compiler.py.
    """
    reader = ConfigReader("torchtitan", config)
    if TITAN_TABLE not in config and is_torchtitan(config):
        table: Any = {}
        reader.note(f"the file has no table {TITAN_TABLE}: this is torchtitan's default")
    else:
        table = reader.section(TITAN_TABLE)
    given = reader.values(table, TORCHTITAN)
    mode, option = given.get("mode", SELECTIVE), given.get("selective_ac_option", "2")
    reader.require(
        mode in (NONE, WHOLE, SELECTIVE, BUDGET),
        f"mode must be none, full, selective or memory_budget (got {shown(mode)})",
    )
    shapes = [name for name in given.get(MM_SHAPES, ()) if name != "moe.router.gate"]
    reader.require(
        not (shapes and mode == SELECTIVE and option == "op"),
        f"{MM_SHAPES} {shown(shapes)} is not translated: ops(...) tells operators apart, not their "
        "shapes",
    )
    if given.get("preserve_rng_state") is False:
        reader.note(
            "preserve_rng_state false has no counterpart: replays always restore the generators"
        )
    if mode != BUDGET:
        if "memory_budget" in given:
            reader.note(f"memory_budget has no counterpart: it has no meaning with mode {mode}")
        reader.note_elsewhere((TITAN_TABLE,))
        return reader.result(_selected(reader, mode, "selective_ac_option", option))
    compiler = config.get("compile", {})
    reader.require(
        isinstance(compiler, Mapping) and compiler.get("enable") is True,
        "mode memory_budget needs the table compile with enable true: the budget is "
        "torch.compile's",
    )
    budget = given.get("memory_budget", 0.5)
    reader.require(0 <= budget <= 1, f"memory_budget must be from 0 to 1 (got {shown(budget)})")
    reader.note_elsewhere((TITAN_TABLE, "compile"))
    return reader.result(unit(0), activation_memory_budget=float(budget))


def from_section(
    system: str, config: Mapping[str, Any], *, tp_size: int | None = None
) -> Translation:
    """Translates the section `activation_checkpointing` of a config of DeepSpeed or OSLO.

    tp_size: the tensor-parallel size. Partitioning needs it, unless the file has it.
    In DeepSpeed the calling code decides which layers are units; here every layer is one. Without
    OSLO's `enable` nothing is rebuilt. Three things differ:

    The originals partition in place, so in evaluation the caller is left with a shard. Here the
    caller's tensor never changes.
    Their contiguous memory is a list of tensors that overflows unless `reset()` is called. Here it
    is one buffer sized by the plan, without `number_checkpoints`.
    Partitioning over one rank does nothing there. Here it is an error.
    """
    reader, table = ConfigReader(system, config), PARTITIONING[system]
    given = reader.values(reader.section(SECTION), table.keys)
    count = given.get("number_checkpoints")
    reader.require(
        count is None or count >= 1,
        f"number_checkpoints must be at least 1 or null (got {shown(count)})",
    )
    place, size = _size_of_file(reader, table)
    if not given.get("enable", "enable" not in table.keys):
        for key in table.keys:
            if given.get(key):
                reader.note(f"{key} does nothing without enable true")
        reader.note_elsewhere((SECTION,))
        return reader.result(unit(0))
    reader.note_elsewhere((SECTION,))
    split, contiguous = given.get(table.split, False), given.get(table.contiguous, False)
    reader.require(
        tp_size is None or tp_size >= 1,
        f"the tensor-parallel size must be at least 1 (got {tp_size})",
    )
    reader.require(
        None in (size, tp_size) or size == tp_size,
        f"the tensor-parallel size {tp_size} contradicts {place} {size} of the file: leave one of "
        "them out",
    )
    reader.require(split or not contiguous, f"{table.contiguous} needs {table.split} true")
    ranks = size or tp_size
    reader.require(
        not split or ranks is not None,
        f"{table.split} splits inputs over tensor-parallel ranks, and the file does not say how "
        "many there are: give --tp N",
    )
    reader.require(
        not split or ranks != 1,
        f"{table.split} needs a tensor-parallel size > 1 (got 1{f' in {place}' if place else ''}): "
        "set it to false, since one rank has nobody to share an input with",
    )
    stores = ["split"] * split + ["host"] * given.get("cpu_checkpointing", False)
    return reader.result(
        unit(1, "+".join(stores) or "device"),
        contiguous_saved_activations=contiguous,
        tensor_model_parallel_size=size if split else None,
    )


from_deepspeed, from_oslo = partial(from_section, "deepspeed"), partial(from_section, "oslo")
SYSTEMS: dict[str, Callable[..., Translation]] = {
    "torchtune": from_torchtune,
    "torchtitan": from_torchtitan,
    "modalities": from_modalities,
    "deepspeed": from_deepspeed,
    "oslo": from_oslo,
}


def is_torchtune(config: Mapping[str, Any]) -> bool:
    """Returns whether the config is clearly one of torchtune."""
    components = (one.get("_component_") for one in config.values() if isinstance(one, Mapping))
    return any(isinstance(name, str) and name.startswith("torchtune.") for name in components) or (
        not TORCHTUNE.keys().isdisjoint(_torchtune_part(config)[1])
    )


def is_torchtitan(config: Mapping[str, Any]) -> bool:
    """Returns whether the config is clearly one of torchtitan."""
    tables = {key for key, value in config.items() if isinstance(value, Mapping)}
    return TITAN_TABLE in tables or (
        "job" in config and not tables.isdisjoint(("model", "training", "parallelism"))
    )


def _is_partitioning(system: str, config: Mapping[str, Any]) -> bool:
    table, inside = PARTITIONING[system], config.get(SECTION)
    keys = table.keys.keys() - {"cpu_checkpointing"}  # which both systems have
    return not set(table.file).isdisjoint(config) or (
        isinstance(inside, Mapping) and not keys.isdisjoint(inside)
    )


RECOGNITION: dict[str, Callable[[Any], bool]] = {
    "torchtune": is_torchtune,
    "torchtitan": is_torchtitan,
    "modalities": is_modalities,
    **{system: partial(_is_partitioning, system) for system in PARTITIONING},
}


def systems_of(config: Any) -> tuple[str, ...]:
    """Returns the systems whose config this may be, by the keys that only they have.

    The result is empty if no key decides.
    """
    if not isinstance(config, Mapping):
        return ()
    found = tuple(system for system, is_one in RECOGNITION.items() if is_one(config))
    undecided = not found and isinstance(config.get(SECTION), Mapping)
    return tuple(PARTITIONING) if undecided else found


def _selected(reader: ConfigReader, mode: str, key: str, option: object) -> Rule:
    """Returns the rule for a mode of torchtune or torchtitan.

    option: the option of the mode selective. It is a number, maybe as text, or 'op'.
    """
    if mode != SELECTIVE:
        return unit(1 if mode == WHOLE else 0)
    if option == "op":
        return operators(OPERATORS)
    if isinstance(option, str) and re.fullmatch(f"[0-9]{{1,{len(str(MAX_STEP))}}}", option):
        option = int(option)
    reader.require(
        isinstance(option, int),
        f"{key} of selective must be 'op' or a number of layers (got {shown(option)})",
    )
    return reader.every(option, key)


def _torchtune_part(recipe: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns the prefix of the keys' places in a recipe, and the section that holds the keys."""
    inner = recipe.get("training")
    if (
        isinstance(inner, Mapping)
        and TORCHTUNE.keys().isdisjoint(recipe)
        and not TORCHTUNE.keys().isdisjoint(inner)
    ):
        return "training.", inner
    return "", recipe


def _memory_efficient_wrapping(reader: ConfigReader, given: Mapping[str, Any]) -> bool:
    """Returns whether token embedding and output projection are FSDP units of their own.

    Notes name the wrapped layers of the file that have no counterpart.
    """
    names = given.get("custom_sharded_layers") or []
    known = [
        name
        for name in names
        if isinstance(name, str) and name.removeprefix("decoder.") in EMBEDDING_AND_OUTPUT
    ]
    others = [name for name in names if name not in known]
    if others:
        reader.note(
            f"custom_sharded_layers {shown(others)} has no counterpart: only token embedding and "
            "output projection can be units of their own"
        )
    if len(known) == 1:
        reader.note(
            f"custom_sharded_layers has {known[0]} alone; --fsdp-memory-efficient-wrapping is for "
            "token embedding and output projection"
        )
    return bool(known) or any(given.get(key, False) for key in WRAPPING[:2])


def _size_of_file(reader: ConfigReader, table: Partitioning) -> tuple[str, int | None]:
    """Returns the key of the tensor-parallel size of a file and the size; "" and None without one.

    A section with `enable` false does not count. Different sizes are a fault.
    """
    config, found = reader.config, {}
    if "tensor_parallel_size" in config:
        found["tensor_parallel_size"] = config["tensor_parallel_size"]
    for name, key in table.sizes:
        part = config.get(name)
        if isinstance(part, Mapping) and key in part and part.get("enable") is not False:
            found[f"{name}.{key}"] = part[key]
    sizes = {place: reader.resolved(value, place) for place, value in found.items()}
    for place, size in sizes.items():
        reader.require(
            type(size) is int and size >= 1,
            f"{place} must be a number of ranks from 1 (got {shown(size)})",
        )
    reader.require(
        len(set(sizes.values())) < 2,
        f"{' and '.join(sizes)} contradict each other: {shown(list(sizes.values()))}",
    )
    return next(iter(sizes.items()), ("", None))
