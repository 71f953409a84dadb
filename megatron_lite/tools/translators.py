"""Translates other systems' activation checkpointing.

Each `from_...` takes that system's own config, the whole of it or its part on activation
checkpointing. It returns a Translation, whose `flags` are the flags to give here. A note names
every value that has no counterpart. A config that the original refuses raises ValueError, and so
does a value of the wrong type. `docs/coming-from.md` has a table for each system; the command is
`tools/translate_recompute.py`.

Two rules hold for all systems. "Every n-th layer" begins with the n-th layer: n = 2 selects layers
1, 3, 5 of a stage, by their number from 0. torchtune, torchtitan and Modalities count calls with
one counter per process instead, which continues in a second model. And a replay always draws the
dropout masks of its forward, even if the original would not restore the generators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_lite.config.policy import LayerAction, Rule
from megatron_lite.tools.translation import (
    EVERY,
    MAX_STEP,
    ConfigKey,
    ConfigReader,
    Translation,
    everything,
    named,
    shown,
    unit,
)

NONE, WHOLE, SELECTIVE, BUDGET = "none", "full", "selective", "memory_budget"
# The results that 'op' keeps in torchtitan and, by their keys, in Modalities. Their lists name
# single kernels: aten.mm but not aten.addmm, so they rebuild every linear with a bias, and no
# attention kernel of a CPU. The groups here hold all kernels of a kind.
OPERATORS = {
    "ops.aten.mm.default": "matmul/2",
    "ops.aten._scaled_dot_product_efficient_attention.default": "attention",
    "ops.aten._scaled_dot_product_flash_attention.default": "attention",
    "ops._c10d_functional.reduce_scatter_tensor.default": "collective",
    "ops.aten.max.default": "max",
}
ROUTER = "ops.aten.topk.default"  # its result is the choice of experts
TORCHTUNE = {
    "enable_activation_checkpointing": ConfigKey(),
    "ac_mode": ConfigKey((str, None), choices=(NONE, WHOLE, SELECTIVE)),
    "ac_option": ConfigKey((int, str, None)),
    "enable_activation_offloading": ConfigKey(),
    "activation_offloading_use_streams": ConfigKey(note="copies overlap wherever the device can"),
    "custom_sharded_layers": ConfigKey((list, None)),
    "memory_efficient_wrapping": ConfigKey(),
    "memory_efficient_fsdp_wrap": ConfigKey(),
}
OF_ACTIVATIONS = re.compile(r"(\w+_)?(ac|activations?)(_\w+)?$")
EMBEDDING_AND_OUTPUT = ("tok_embeddings", "output")  # names in torchtune, maybe after "decoder."
TITAN_TABLE = "activation_checkpoint"
TORCHTITAN = {
    "mode": ConfigKey((str,), choices=(NONE, WHOLE, SELECTIVE, BUDGET)),
    "selective_ac_option": ConfigKey((int, str)),
    "per_op_sac_force_recompute_mm_shapes_by_fqns": ConfigKey(
        (list,), "ops(...) tells operators apart, not their shapes"
    ),
    "early_stop": ConfigKey(
        note="a replay leaves out its last matmul unless --no-recompute-tail-skip is given"
    ),
    "memory_budget": ConfigKey((int, float)),
    "visualize_memory_budget_pareto": ConfigKey(
        note="it draws what the compiler could do, and trains no differently"
    ),
    "preserve_rng_state": ConfigKey(),
    "determinism_check": ConfigKey((str,), "--recompute-verify compares values"),
    "debug": ConfigKey(note="--recompute-verify names the layer and the tensor that differ"),
}
SECTION = "activation_checkpointing"  # in configs of DeepSpeed and OSLO
PARTITIONING = {
    "deepspeed": {
        "partition_activations": ConfigKey(name="split"),
        "cpu_checkpointing": ConfigKey(name="host"),
        "contiguous_memory_optimization": ConfigKey(name="contiguous"),
        "number_checkpoints": ConfigKey((int, None), "the buffer is sized by the plan"),
        "synchronize_checkpoint_boundary": ConfigKey(
            note="nothing waits for the device within a step"
        ),
        "profile": ConfigKey(note="--memory-timeline shows the replays of a step"),
    },
    "oslo": {
        "enable": ConfigKey(),
        "partitioned_checkpointing": ConfigKey(name="split"),
        "cpu_checkpointing": ConfigKey(name="host"),
        "contiguous_checkpointing": ConfigKey(name="contiguous"),
    },
}
# The sections, or "" for the file itself, and their keys that may have the tensor-parallel size.
SIZES = (
    *(("", "tensor_parallel_size"), ("tensor_parallel", "autotp_size")),
    *(("model_parallelism", "tensor_parallel_size"), ("tensor_parallelism", "parallel_size")),
)
# The values of ac_variant, and the parameters of each.
VARIANTS: dict[str, dict[str, ConfigKey]] = {
    "full_activation_checkpointing": {},
    "selective_layer_activation_checkpointing": {"ac_freq": ConfigKey((int,))},
    "selective_op_activation_checkpointing": {"save_ops_keys": ConfigKey((list,))},
}
BY_VARIANT, BY_CLASS = "ac_variant", "activation_checkpointing_modules"
OF_CLASSES = {BY_CLASS: ConfigKey((list, None)), "model": ConfigKey((object,))}
OF_VARIANT = {
    BY_VARIANT: ConfigKey((str,), choices=VARIANTS),
    "sac_variant": ConfigKey((str,), name=BY_VARIANT, choices=VARIANTS),  # in earlier versions
    "ac_fun_params": ConfigKey((dict, None)),
    "sac_fun_params": ConfigKey((dict, None), name="ac_fun_params"),
    "layers_fqn": ConfigKey((str,), "the policy counts the layers of the model that is trained"),
    "model": ConfigKey((object,)),
}
# A mapping with one of these keys says what to recompute.
MODALITIES = (BY_CLASS, BY_VARIANT, "sac_variant", "sac_fun_params")
# The keys of Trainer, TRL, axolotl, accelerate and NeMo Automodel, and those of the `.._kwargs`.
OFFLOADING = ("offload", "offload_disk", "unsloth")
SWITCH = ConfigKey(
    (bool, str, None), name="gradient_checkpointing", choices=(True, False, *OFFLOADING)
)
EVERY_N = ConfigKey((int, None))
HF = {
    "gradient_checkpointing": SWITCH,
    "activation_checkpointing": SWITCH,
    "fsdp_activation_checkpointing": SWITCH,
    "gradient_checkpointing_kwargs": ConfigKey((dict, None)),
    "activation_checkpointing_kwargs": ConfigKey((dict, None)),
    "every_n_layers": EVERY_N,
    "activation_offloading": ConfigKey(
        (bool, str, None), name="offload", choices=(True, False, "legacy", "disk")
    ),
}
HF_KWARGS = {
    "every_n_layers": EVERY_N,
    "offload": ConfigKey((bool, None)),
    "use_reentrant": ConfigKey((bool, None)),  # a replay here is of neither kind
    "preserve_rng_state": ConfigKey(),
    "determinism_check": ConfigKey((str,), "--recompute-verify compares values"),
    "early_stop": ConfigKey(),
}
# The endings of the names of classes that are whole layers, and the names of MLPs.
LAYER_CLASSES = ("Block", "DecoderLayer", "TransformerLayer", "EncoderLayer")
MLP_CLASSES = ("TransformerMLP", "SwiGLU", "MLP")


def from_torchtune(recipe: Mapping[str, Any]) -> Translation:
    """Translates a recipe's keys on activation checkpointing, offloading and wrapping.

    `TORCHTUNE` lists the keys. They may also be in a section `training` or `fsdp`. If both
    `enable_activation_checkpointing` and `ac_mode` are set, torchtune applies neither; here
    `ac_mode` decides. torchtune never implemented its `ac_option` 'op'; here it means the same as
    in torchtitan. Offloading moves what every layer saves to host memory, whether the layer is
    rebuilt or not.
    """
    reader = ConfigReader("torchtune", recipe)
    places = {
        place: (key, value)
        for place, value in everything(recipe)
        if (key := re.sub(r"^(training\.)?(fsdp\.)?", "", place)) in TORCHTUNE
        or OF_ACTIVATIONS.match(key)  # a key that torchtune does not know is an error
    }
    given = reader.values(dict(places.values()), TORCHTUNE).get
    enabled, mode, option = (
        given("enable_activation_checkpointing"),
        given("ac_mode"),
        given("ac_option"),
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
    mode = mode or (WHOLE if enabled else NONE)
    if option is not None and mode != SELECTIVE:
        reader.note(f"ac_option has no meaning with ac_mode {mode}")
    rules = [_selected(reader, mode, "ac_option", option)]
    if given("enable_activation_offloading"):
        reader.require(
            enabled is True,
            "enable_activation_offloading needs enable_activation_checkpointing true",
        )
        rules = _on_the_host(rules[0])
    names = [str(name).removeprefix("decoder.") for name in given("custom_sharded_layers") or ()]
    if names and set(names) != set(EMBEDDING_AND_OUTPUT):
        reader.note(
            f"custom_sharded_layers {shown(names)} has no counterpart: "
            "--fsdp-memory-efficient-wrapping is for token embedding and output projection"
        )
    wrapped = (
        not set(names).isdisjoint(EMBEDDING_AND_OUTPUT)
        or given("memory_efficient_wrapping")
        or given("memory_efficient_fsdp_wrap")
    )
    more = ["--use-torch-fsdp2", "--fsdp-memory-efficient-wrapping"] if wrapped else []
    return reader.result(places, *rules, more=more)


def from_torchtitan(config: Mapping[str, Any]) -> Translation:
    """Translates the table `activation_checkpoint` of a job config.

    The default of `mode` is selective, and the default option is every 2nd layer. A whole file
    without the table means torchtitan's defaults. `selective_ac_option` 'op' keeps every second
    matmul. torchtitan counts aten.mm alone, so it always rebuilds a linear with a bias; here every
    matmul counts. `memory_budget` needs the table `compile` with `enable`. Here it also compiles
    each layer, see training/build_trainer.py.
    """
    reader = ConfigReader("torchtitan", config)
    table: Any = {}
    if TITAN_TABLE not in config and "torchtitan" in systems_of(config):
        reader.note(f"the file has no table {TITAN_TABLE}: this is torchtitan's default")
    else:
        table = reader.section(TITAN_TABLE)
    given = reader.values(table, TORCHTITAN)
    mode, option = given.get("mode", SELECTIVE), given.get("selective_ac_option", "2")
    if mode != BUDGET:
        if "memory_budget" in given:
            reader.note(f"memory_budget has no counterpart: it has no meaning with mode {mode}")
        rule = _selected(reader, mode, "selective_ac_option", option)
        return reader.result([TITAN_TABLE], rule)
    compiler = config.get("compile", {})
    reader.require(
        isinstance(compiler, Mapping) and compiler.get("enable") is True,
        "mode memory_budget needs the table compile with enable true: the budget is "
        "torch.compile's",
    )
    budget = given.get("memory_budget", 0.5)
    reader.require(0 <= budget <= 1, f"memory_budget must be from 0 to 1 (got {shown(budget)})")
    more = ["--torch-compile", "--activation-memory-budget", str(float(budget))]
    return reader.result([TITAN_TABLE, "compile"], more=more)


def _selected(reader: ConfigReader, mode: str, key: str, option: object) -> Rule:
    """Returns the rule for a mode of torchtune or torchtitan.

    option: the option of the mode selective. It is a number, maybe as text, or 'op'.
    """
    if mode != SELECTIVE:
        return unit(1 if mode == WHOLE else 0)
    if option == "op":
        return _operators(OPERATORS)
    if isinstance(option, str) and re.fullmatch(f"[0-9]{{1,{len(str(MAX_STEP))}}}", option):
        option = int(option)
    return reader.every(option, f"{key} of selective must be 'op', or it")


def _on_the_host(rule: Rule) -> list[Rule]:
    """Returns the rules that move what every layer keeps to the host, rebuilt or not."""
    return [replace(rule, store="host"), *([unit(0, "host")] * (rule.layers != EVERY))]


def _operators(keys: Container[str]) -> Rule:
    """Returns a rule for every layer: it keeps these operators' results and rebuilds the rest."""
    ops = dict.fromkeys(name for key, name in OPERATORS.items() if key in keys)
    action = LayerAction(ops=tuple(ops), unit=int(not ops), router=ROUTER in keys)
    return Rule(layers=EVERY, action=action)


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
    reader, keys = ConfigReader(system, config), PARTITIONING[system]
    given = reader.values(reader.section(SECTION), keys)
    theirs = {own.name: key for key, own in keys.items()}
    if not given.get("enable", "enable" not in keys):
        for name in ("split", "host", "contiguous"):
            if given.get(name):
                reader.note(f"{theirs[name]} does nothing without enable true")
        return reader.result([SECTION], unit(0))
    sizes = {} if tp_size is None else {"--tp": tp_size}
    for name, key in SIZES:
        part = config.get(name) if name else config
        # a section with enable false does not count
        if isinstance(part, Mapping) and key in part and part.get("enable") is not False:
            place = f"{name}.{key}".removeprefix(".")
            size = reader.resolved(part[key], place)
            # 0 and 1 turn DeepSpeed's own splitting off: the size is then that of the caller.
            if key != "autotp_size" or type(size) is not int or size not in (0, 1):
                sizes[place] = size
    for place, size in sizes.items():
        reader.require(
            type(size) is int and size >= 1,
            f"{place}, the tensor-parallel size, must be at least 1 (got {shown(size)})",
        )
    reader.require(
        len(set(sizes.values())) < 2,
        f"the tensor-parallel sizes contradict each other: {shown(sizes)}: leave one of them out",
    )
    split, contiguous = given.get("split", False), given.get("contiguous", False)
    reader.require(split or not contiguous, f"{theirs['contiguous']} needs {theirs['split']} true")
    reader.require(
        not split or any(size > 1 for size in sizes.values()),
        f"{theirs['split']} splits inputs over tensor-parallel ranks and needs a tensor-parallel "
        f"size > 1 (got {max(sizes.values(), default='none')}): give --tp N, or set it to false",
    )
    stores = ["split"] * split + ["host"] * given.get("host", False)
    more = ["--contiguous-saved-activations"] * contiguous
    if split and sizes.keys() - {"--tp"}:
        more += ["--tensor-model-parallel-size", str(max(sizes.values()))]
    return reader.result([SECTION], unit(1, "+".join(stores) or "device"), more=more)


def from_modalities(config: Mapping[str, Any], *, component: str | None = None) -> Translation:
    """Translates a whole config, or one component of it.

    A config of Modalities is a graph of components, each a mapping with a `config`. They refer to
    others by `instance_key`. Whatever has `ac_variant` or `activation_checkpointing_modules`
    recomputes: a component, or the `config` of one.

    component: the component to read, if the file has several that recompute.
    The layers are those of the model that is trained. `recompute.apply.apply_policy_` takes a
    `layers_fqn` for any other layers. Modalities keeps every second result of aten.mm, whatever the
    config says; `OPERATORS` lists the meaning of the keys. A whole file without a component that
    recomputes is translated to no recomputation.
    """
    reader = ConfigReader("modalities", config)
    parts = dict(_recomputing(config))
    in_use = _in_use(reader, parts, component)
    if in_use is None:
        reader.require(
            "modalities" in systems_of(config),
            f"there is no component activation_checkpointed, and no {BY_VARIANT}, so nothing is "
            "said of recomputation: choose a --recompute-policy yourself",
        )
        reader.note("no component activation_checkpointed is in use, so nothing is recomputed")
        return reader.result(parts, unit(0))
    given = parts.pop(in_use)
    rule = (_of_classes if BY_CLASS in given else _of_variant)(reader, given)
    for place in parts:
        reader.note(f"the component {named(place)} would recompute too, and is not the one in use")
    return reader.result(
        [in_use, *(f"{in_use}.{key}".removeprefix(".") for key in given), *parts], rule
    )


def _of_variant(reader: ConfigReader, given: Mapping[str, Any]) -> Rule:
    values = reader.values(given, OF_VARIANT)
    variant, fqn = values.get(BY_VARIANT), values.get("layers_fqn", "layers")
    reader.choice(BY_VARIANT, variant, VARIANTS)  # it may be missing
    reader.require(
        all(part.isidentifier() or part.isdigit() for part in fqn.split(".")),
        f"layers_fqn must be a name such as transformer.h (got {shown(fqn)})",
    )
    keys = VARIANTS[variant]  # type: ignore[index]
    parameters = reader.values(values.get("ac_fun_params") or {}, keys)
    if not keys:
        return unit(1)
    if "ac_freq" in keys:
        return reader.every(parameters.get("ac_freq"), "ac_freq")
    names = parameters.get("save_ops_keys") or [None]
    for name in names:
        reader.choice("save_ops_keys", name, [*OPERATORS, ROUTER])
    return _operators(names)


def _of_classes(reader: ConfigReader, given: Mapping[str, Any]) -> Rule:
    """Translates `activation_checkpointing_modules`, a list of classes whose modules recompute."""
    values = reader.values(given, OF_CLASSES)
    names = values.get(BY_CLASS) or []
    units = [  # classes of FSDP units, which are layers
        value for place, value in everything(reader.config) if "block_names." in place
    ]
    for name in names:
        reader.require(
            isinstance(name, str)
            and (name in units or name.endswith(LAYER_CLASSES) or name in MLP_CLASSES),
            f"{BY_CLASS}: {shown(name)} is no class of a whole layer (such as GPT2Block, or a name "
            f"in block_names) nor of its MLP ({', '.join(MLP_CLASSES)}); give a --recompute-policy "
            "with regions instead",
        )
    inner = [name for name in names if name in MLP_CLASSES]
    if names and len(inner) == len(names):
        return Rule(layers=EVERY, action=LayerAction(regions=("mlp",)))
    for name in inner:
        reader.note(f"{BY_CLASS}: {name} is part of a layer, and layers are recomputed whole")
    return unit(1 if names else 0)


def _recomputing(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields what says in a file what to recompute, and its place."""
    for place, value in everything(config):
        if isinstance(value, Mapping) and not value.keys().isdisjoint(MODALITIES):
            yield place.removesuffix(".config"), value


def _in_use(reader: ConfigReader, parts: Mapping[str, object], wanted: str | None) -> str | None:
    """Returns the place of the part that recomputes, or None if the file has none.

    If the file has several, `wanted` must choose one of them.
    """
    several = ", ".join(named(place) for place in list(parts)[:5])
    if wanted is not None:
        reader.require(
            wanted in parts,
            f"no component {shown(wanted)} recomputes (these do: {several or 'none'})",
        )
        return wanted
    found = list(parts)
    if "app_state" in reader.config:
        reached = _reached(reader.config, "app_state")
        found = [place for place in found if place in reached]
    reader.require(
        len(found) < 2, f"several components recompute ({several}): give --component NAME"
    )
    return found[0] if found else None


def _reached(config: Mapping[str, Any], start: str) -> set[str]:
    """Returns the places that the component `start` reaches by reference, directly or not."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in reached and name in config:
            for place, value in everything(config[name], name):
                reached.add(place)
                if isinstance(value, Mapping) and isinstance(value.get("instance_key"), str):
                    waiting.append(value["instance_key"])
    return reached


def from_hf(config: Mapping[str, Any]) -> Translation:
    """Translates the keys of Trainer, TRL, axolotl and NeMo Automodel on activation checkpointing.

    `HF` and `HF_KWARGS` list the keys, which may be at any place of the file. The flags also hold
    for other people's models: `api.apply_policy_` takes the text of the policy. Offloading moves
    what a layer keeps to host memory, whether the layer is rebuilt or not.
    """
    reader = ConfigReader("hf", config)
    read, given = [], dict[str, Any]()
    for place, value in everything(config):
        key = place.rpartition(".")[2]
        if key not in HF:
            continue
        read.append(place)
        for name, one in reader.values({key: value}, HF).items():
            parts = reader.values(one, HF_KWARGS) if isinstance(one, Mapping) else {name: one}
            for part, found in parts.items():
                if found in (None, False):
                    continue  # any of the switches turns it on
                reader.require(
                    given.setdefault(part, found) == found,
                    f"{part} is {shown(given[part])} and {shown(found)}: leave one of them out",
                )
    reader.require(
        bool(read),
        "there is no gradient_checkpointing, so nothing is said of recomputation: choose a "
        "--recompute-policy yourself",
    )
    mode, offload = given.get("gradient_checkpointing"), given.get("offload")
    if "disk" in f"{mode} {offload}":
        reader.note("offloading to a disk has no counterpart: host memory takes its place")
    every = given.get("every_n_layers") or 1
    rule = reader.every(every, "every_n_layers") if mode and every != 1 else unit(int(bool(mode)))
    is_offloaded = mode in OFFLOADING or offload
    return reader.result(read, *(_on_the_host(rule) if is_offloaded else [rule]))


from_deepspeed, from_oslo = partial(from_section, "deepspeed"), partial(from_section, "oslo")
SYSTEMS: dict[str, Callable[..., Translation]] = {
    "torchtune": from_torchtune,
    "torchtitan": from_torchtitan,
    "modalities": from_modalities,
    "deepspeed": from_deepspeed,
    "oslo": from_oslo,
    "hf": from_hf,
}
# What only one system has among the lines "PLACE=VALUE" of a config. A mapping's value is "".
_OF_SECTION = {  # both have cpu_checkpointing
    system: "|".join(keys.keys() - {"cpu_checkpointing"}) for system, keys in PARTITIONING.items()
}
MARKS = {
    "torchtune": rf"(training\.)?({'|'.join(TORCHTUNE)})=|\w+\._component_=torchtune\.",
    "torchtitan": rf"({TITAN_TABLE}|job)=$",
    "modalities": rf"({'|'.join(MODALITIES)})=|(\w+\.)?component_key=",
    "deepspeed": "(train_batch_size|train_micro_batch_size_per_gpu|zero_optimization"
    "|zero_allow_untested_optimizer|steps_per_print|wall_clock_breakdown"
    rf"|{SECTION}\.({_OF_SECTION['deepspeed']}))=",
    "oslo": "((model|data|tensor|sequence|pipeline|expert)_parallelism|kernel_fusion"
    rf"|lazy_initialization|tensor_parallel_size|{SECTION}\.({_OF_SECTION['oslo']}))=",
    "hf": rf"(\w+\.)*({'|'.join(HF.keys() - {'activation_checkpointing'})})="
    r"|(\w+\.)*activation_checkpointing=\w",
}


def systems_of(config: Any) -> tuple[str, ...]:
    """Returns the systems whose config this may be, by the keys that only they have.

    The result is empty if no key decides.
    """
    lines = [
        f"{place}={'' if isinstance(value, (Mapping, list)) else str(value)}"
        for place, value in everything(config)
    ]
    found = tuple(
        system
        for system, mark in MARKS.items()
        if any(re.match(mark, line) is not None for line in lines)
    )
    undecided = not found and isinstance(config, Mapping) and SECTION in config
    return tuple(PARTITIONING) if undecided else found
