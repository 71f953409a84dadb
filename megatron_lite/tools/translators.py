"""Translates other systems' activation checkpointing.

`translated` takes a system's own config, the whole of it or its part on activation checkpointing.
It returns a Translation, whose `flags` are the flags to give here. A note names every value that
has no counterpart. A config that the original refuses raises ValueError, and so does a value of the
wrong type. `docs/coming-from.md` has a table for each system; the command is
`tools/translate_recompute.py`.

Each system has tables of the keys that are read, and a function that makes rules of their values.
"Every n-th layer" begins with the n-th layer: n = 2 selects layers 1, 3, 5 of a stage, by their
number from 0. torchtune, torchtitan and Modalities count calls with one counter per process
instead, which continues in a second model. transformers alone begins with the first layer. A replay
always draws the dropout masks of its forward, even if the original would not restore the
generators.
"""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from .translation import NOTHING, WHOLE_LAYERS, Key, Settings, Table, Translation, everything, shown

ANYWHERE = ".*"
SWITCH, NUMBER, LIST = Key(), Key((int, None)), Key((list, None))
SILENT = "so nothing is said of recomputation: choose a --recompute-policy yourself"

# --- torchtune ---

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
    "enable_activation_checkpointing": SWITCH,
    "ac_mode": Key((NONE, WHOLE, SELECTIVE, None)),
    "ac_option": Key((int, str, None)),
    "enable_activation_offloading": SWITCH,
    "activation_offloading_use_streams": Key(note="copies overlap wherever the device can"),
    "custom_sharded_layers": LIST,
    "memory_efficient_wrapping": Key(name="wrapped"),
    "memory_efficient_fsdp_wrap": Key(name="wrapped"),
}
EMBEDDING_AND_OUTPUT = {"tok_embeddings", "output"}  # names in torchtune, maybe after "decoder."


def from_torchtune(found: Settings) -> str:
    """Translates a recipe's keys on activation checkpointing, offloading and wrapping.

    If both `enable_activation_checkpointing` and `ac_mode` are set, torchtune applies neither; here
    `ac_mode` decides. torchtune never implemented its `ac_option` 'op'; here it means the same as
    in torchtitan. Offloading moves what every layer saves to host memory, whether the layer is
    rebuilt or not.
    """
    given = found.given.get
    enabled, mode = given("enable_activation_checkpointing"), given("ac_mode")
    found.require(
        not (enabled and mode == NONE),
        "enable_activation_checkpointing true and ac_mode none contradict each other: leave one of "
        "them out",
    )
    if enabled and mode:
        found.note(
            f"ac_mode {mode} beside enable_activation_checkpointing true makes torchtune apply "
            "neither; here ac_mode says how"
        )
    rule = _of_mode(found, mode or (WHOLE if enabled else NONE), "ac_option")
    if given("enable_activation_offloading"):
        found.require(
            enabled is True,
            "enable_activation_offloading needs enable_activation_checkpointing true",
        )
        rule = _on_the_host(rule)
    names = {str(name).removeprefix("decoder.") for name in given("custom_sharded_layers", ())}
    if names not in (set(), EMBEDDING_AND_OUTPUT):
        found.note(
            f"custom_sharded_layers {shown(sorted(names))} has no counterpart: "
            "--fsdp-memory-efficient-wrapping is for token embedding and output projection"
        )
    if given("wrapped") or names & EMBEDDING_AND_OUTPUT:
        found.flags += ["--use-torch-fsdp2", "--fsdp-memory-efficient-wrapping"]
    return rule


def _of_mode(found: Settings, mode: str, key: str, default: object = None) -> str:
    """Returns the rule for a mode of torchtune or torchtitan.

    key: that of the option of the mode selective, a number, maybe as text, or 'op'.
    """
    option = found.given.get(key)
    if mode != SELECTIVE:
        if option is not None:
            found.note(f"{key} has no meaning with mode {mode}")
        return WHOLE_LAYERS if mode == WHOLE else NOTHING
    option = default if option is None else option
    if option == "op":
        return _operators(OPERATORS)
    return found.every(option, f"{key} of selective must be 'op', or it")


def _on_the_host(rule: str) -> str:
    """Returns the rules that move what every layer keeps to the host, rebuilt or not."""
    return f"{rule}@host" + f"; {NOTHING}@host" * (not rule.startswith("*"))


def _operators(keys: Container[str]) -> str:
    """Returns a rule for every layer: it keeps these operators' results and rebuilds the rest."""
    ops = dict.fromkeys(name for key, name in OPERATORS.items() if key in keys)
    rule = f"*:ops({','.join(ops)})" if ops else WHOLE_LAYERS
    return rule + "+router" * (ROUTER in keys)


# --- torchtitan ---

TITAN_TABLE, OPTION = "activation_checkpoint", "selective_ac_option"
TORCHTITAN = {
    "mode": Key((NONE, WHOLE, SELECTIVE, BUDGET)),
    OPTION: Key((int, str)),
    **dict.fromkeys(
        ("per_op_sac_force_recompute_mm_shapes_by_fqns", "force_recompute_mm_shapes_by_fqns"),
        Key((list,), note="ops(...) tells operators apart, not their shapes"),
    ),
    "early_stop": Key(
        note="a replay leaves out its last matmul unless --no-recompute-tail-skip is given"
    ),
    BUDGET: Key((int, float)),
    "visualize_memory_budget_pareto": Key(
        note="it draws what the compiler could do, and trains no differently"
    ),
    "preserve_rng_state": SWITCH,
    "determinism_check": Key((str,), note="--recompute-verify compares values"),
    "debug": Key(note="--recompute-verify names the layer and the tensor that differ"),
}


def from_torchtitan(found: Settings) -> str:
    """Translates the table `activation_checkpoint` of a job config.

    The default of `mode` is selective, and the default option is every 2nd layer, up to version
    0.2; later versions have 'op' alone. A whole file without the table means torchtitan's defaults.
    `selective_ac_option` 'op' keeps every second matmul. torchtitan counts aten.mm alone, so it
    always rebuilds a linear with a bias; here every matmul counts. `memory_budget` needs the table
    `compile` with `enable`. Here it also compiles each layer, see training/build_trainer.py.
    """
    if TITAN_TABLE not in found.read:
        is_whole = "torchtitan" in systems_of(found.config)
        found.require(is_whole, f"there is no section {TITAN_TABLE}, {SILENT}")
        found.note(f"the file has no table {TITAN_TABLE}: this is torchtitan's default")
    mode, budget = found.given.get("mode", SELECTIVE), found.given.get(BUDGET, 0.5)
    if mode != BUDGET:
        if BUDGET in found.given:
            found.note(f"memory_budget has no counterpart: it has no meaning with mode {mode}")
        default: object = 2
        if "force_recompute_mm_shapes_by_fqns" in found.given:  # from version 0.3 on
            default = "op"
        elif mode == SELECTIVE and OPTION not in found.given:
            found.note(f"{OPTION} is not given: 2 up to version 0.2, but 'op' from 0.3 on")
        return _of_mode(found, mode, OPTION, default)
    found.require(
        "compiled" in found.given and "model" in found.given.get("components", ["model"]),
        "mode memory_budget needs the table compile with enable true, and model in its components: "
        "the budget is torch.compile's",
    )
    found.require(0 <= budget <= 1, f"memory_budget must be from 0 to 1 (got {shown(budget)})")
    found.read.add("compile")
    found.flags += ["--torch-compile", "--activation-memory-budget", str(float(budget))]
    return ""


# --- DeepSpeed and OSLO ---

SECTION = "activation_checkpointing"
SIZE = "the tensor-parallel size"
SIZED = {"tensor_parallel_size": Key((int,), SIZE)}
PARTITIONING = {
    "deepspeed": {
        "partition_activations": Key(name="split"),
        "cpu_checkpointing": Key(name="host"),
        "contiguous_memory_optimization": Key(name="contiguous"),
        "number_checkpoints": Key((int, None), note="the buffer is sized by the plan"),
        "synchronize_checkpoint_boundary": Key(note="nothing waits for the device within a step"),
        "profile": Key(note="--memory-timeline shows the replays of a step"),
    },
    "oslo": {
        "enable": Key(name="enabled"),
        "partitioned_checkpointing": Key(name="split"),
        "cpu_checkpointing": Key(name="host"),
        "contiguous_checkpointing": Key(name="contiguous"),
    },
}


def from_section(found: Settings) -> str:
    """Translates the section `activation_checkpointing` of a config of DeepSpeed or OSLO.

    Partitioning needs the tensor-parallel size, from the file or given by the user. In DeepSpeed
    the calling code decides which layers are units; here every layer is one. Without OSLO's
    `enable` nothing is rebuilt. Three things differ:

    The originals partition in place, so in evaluation the caller is left with a shard. Here the
    caller's tensor never changes.
    Their contiguous memory is a list of tensors that overflows unless `reset()` is called. Here it
    is one buffer sized by the plan, without `number_checkpoints`.
    Partitioning over one rank does nothing there. Here it is an error.
    """
    found.require(SECTION in found.read, f"there is no section {SECTION}, {SILENT}")
    theirs = {row.name: key for key, row in PARTITIONING[found.system].items()}
    given = found.given.get
    split, host, contiguous = given("split"), given("host"), given("contiguous")
    if found.system == "oslo" and not given("enabled"):
        for name in ("split", "host", "contiguous"):
            if given(name):
                found.note(f"{theirs[name]} does nothing without enable true")
        return NOTHING
    # 0 and 1 turn DeepSpeed's own splitting off: the size is then that of the caller.
    if given("autotp_size", 0) not in (0, 1):
        found.give(SIZE, given("autotp_size"))
    size, asked = given(SIZE), given("--tp")
    if asked is not None:
        found.give(SIZE, asked)
    tp_size = given(SIZE, 1)
    found.require(tp_size >= 1, f"{SIZE} must be at least 1 (got {tp_size})")
    found.require(
        bool(split or not contiguous), f"{theirs['contiguous']} needs {theirs['split']} true"
    )
    found.require(
        not split or tp_size > 1,
        f"{theirs['split']} splits inputs over tensor-parallel ranks and needs a tensor-parallel "
        f"size > 1 (got {tp_size}): give --tp N, or set it to false",
    )
    if contiguous:
        found.flags += ["--contiguous-saved-activations"]
    if split and size:
        found.flags += ["--tensor-model-parallel-size", str(size)]
    store = "+".join(["split"] * bool(split) + ["host"] * bool(host))
    return WHOLE_LAYERS + f"@{store}" * bool(store)


# --- Modalities ---

BY_VARIANT, BY_CLASS = "ac_variant", "activation_checkpointing_modules"
# The values of ac_variant, and the parameter of each.
VARIANTS = {
    "full_activation_checkpointing": "",
    "selective_layer_activation_checkpointing": "ac_freq",
    "selective_op_activation_checkpointing": "save_ops_keys",
}
VARIANT, PARAMETERS = Key((*VARIANTS,), BY_VARIANT), Key((dict, None))
MODALITIES = {
    BY_CLASS: LIST,
    BY_VARIANT: VARIANT,
    "sac_variant": VARIANT,  # in earlier versions
    "sac_fun_params": PARAMETERS,
    "ac_fun_params": PARAMETERS,
    "layers_fqn": Key((str,), note="the policy counts the layers of the model that is trained"),
}
# The endings of the names of classes that are whole layers, and the names of MLPs.
LAYER_CLASSES = ("Block", "DecoderLayer", "TransformerLayer", "EncoderLayer")
MLP_CLASSES = ("TransformerMLP", "SwiGLU", "MLP")


def from_modalities(found: Settings) -> str:
    """Translates a whole config, or one component of it.

    A config of Modalities is a graph of components, each a mapping with a `config`. Every component
    counts as used: several that recompute must do so alike.
    The layers are those of the model that is trained. `recompute.apply.apply_policy_` takes a
    `layers_fqn` for any other layers. Modalities keeps every second result of aten.mm, whatever the
    config says; `OPERATORS` lists the meaning of the keys. A whole file without a component that
    recomputes is translated to no recomputation.
    """
    given = found.given
    # The component itself is read, and its keys below `config`.
    found.read |= {place.rpartition(".")[0].removesuffix(".config") for place in found.read}
    variant, parameters = given.get(BY_VARIANT), given.keys() & {*VARIANTS.values()}
    if BY_CLASS in given:
        found.require(variant is None, f"both {BY_CLASS} and {BY_VARIANT}: leave one of them out")
        return _of_classes(found, given[BY_CLASS])
    if variant is None:
        is_whole = "modalities" in systems_of(found.config)
        found.require(
            is_whole and not parameters,
            f"there is no component activation_checkpointed, and no {BY_VARIANT}, {SILENT}",
        )
        found.note("no component activation_checkpointed is in use, so nothing is recomputed")
        return NOTHING
    parameter = VARIANTS[variant]
    for name in parameters - {parameter}:
        found.require(False, f"{name} does not belong to {variant}: leave it out")
    if parameter == "ac_freq":
        return found.every(given.get(parameter), parameter)
    if not parameter:
        return WHOLE_LAYERS
    keys = given.get(parameter) or [None]
    for key in keys:
        found.require(
            key in (*OPERATORS, ROUTER),
            f"{parameter} must be one of {', '.join((*OPERATORS, ROUTER))} (got {shown(key)})",
        )
    return _operators(keys)


def _of_classes(found: Settings, names: Sequence[Any]) -> str:
    """Translates `activation_checkpointing_modules`, a list of classes whose modules recompute."""
    units = [  # classes of FSDP units, which are layers
        value for place, value in everything(found.config) if "block_names." in place
    ]
    for name in names:
        found.require(
            isinstance(name, str)
            and (name in units or name.endswith(LAYER_CLASSES) or name in MLP_CLASSES),
            f"{BY_CLASS}: {shown(name)} is no class of a whole layer (such as GPT2Block, or a name "
            f"in block_names) nor of its MLP ({', '.join(MLP_CLASSES)}); give a --recompute-policy "
            "with regions instead",
        )
    inner = [name for name in names if name in MLP_CLASSES]
    if names and len(inner) == len(names):
        return "*:mlp"
    for name in inner:
        found.note(f"{BY_CLASS}: {name} is part of a layer, and layers are recomputed whole")
    return WHOLE_LAYERS if names else NOTHING


# --- Trainer, TRL, axolotl, accelerate and NeMo Automodel ---

OFFLOADING = ("offload", "offload_disk", "unsloth")
HIDDEN, OPS_SAVED = "hidden_states", "selective_checkpointing"
MODE = Key((bool, WHOLE, SELECTIVE, *OFFLOADING, None), "gradient_checkpointing")
FSDP = Key((bool, None), "fsdp")
HF = {
    "gradient_checkpointing": MODE,
    "activation_checkpointing": MODE,
    "fsdp_activation_checkpointing": FSDP,
    "gradient_checkpointing_kwargs": PARAMETERS,
    "activation_checkpointing_kwargs": PARAMETERS,
    "every_n_layers": NUMBER,
    "activation_offloading": Key((bool, "legacy", "disk", HIDDEN, None), "all offload"),
    OPS_SAVED: Key((bool, dict, None), SELECTIVE),
}
HF_OPS_SAVED = {
    "save": LIST,
    "offload": Key((bool, None)),
    "save_sliding_window": Key(note="the attention of all layers is kept"),
    "recompute_layer_types": Key((list, None), note="the attention of all layers is kept"),
}
# What a saved operator of axolotl is here.
GROUPS = {"attention": "attention"}
GROUPS |= dict.fromkeys(("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul"), "matmul")
HF_KWARGS = {
    "every_n_layers": NUMBER,
    "offload": Key((bool, None)),
    "selective": SWITCH,
    "use_reentrant": Key((bool, None)),  # a replay here is of neither kind
    "preserve_rng_state": SWITCH,
    "determinism_check": Key((str,), note="--recompute-verify compares values"),
    "early_stop": SWITCH,
}


def from_hf(found: Settings) -> str:
    """Translates the keys of Trainer, TRL, axolotl and NeMo Automodel on activation checkpointing.

    The keys may be at any place of the file. The flags also hold for other people's models:
    `api.apply_policy_` takes the text of the policy. `activation_offloading` moves what every layer
    keeps to host memory; its value "hidden_states" and the kwarg `offload` move that of the layers
    that are rebuilt. The kwarg `selective` of TRL and `selective_checkpointing` of axolotl keep the
    results of attention. The kwargs count with the Trainer's own switch, not with FSDP's.
    """
    found.require(bool(found.read), f"there is no gradient_checkpointing, {SILENT}")
    for _, section in everything(found.config):
        for end in ("", "_kwargs") if isinstance(section, Mapping) else ():
            new, old = (section.get(f"{name}{end}") for name in (SECTION, MODE.name))
            found.require(
                None in (new, old) or new == old,
                f"{SECTION}{end} {shown(new)} and {MODE.name}{end} {shown(old)} contradict each "
                "other: leave one of them out",
            )
    given = found.given.get
    mode, everywhere = given(MODE.name), given("all offload")
    found.require(
        not (mode and given("fsdp")),
        "activation_checkpointing of fsdp_config and of the training arguments are both true, "
        "which the Trainer refuses: leave one of them out",
    )
    found.require(
        not everywhere or any(place.endswith("_checkpointing") for place in found.read),
        "activation_offloading needs gradient_checkpointing, true or false, beside it: TRL's "
        "default is true, and that of others false",
    )
    is_selective = given(SELECTIVE) or any(
        isinstance(value, Mapping) and place.endswith(OPS_SAVED)
        for place, value in everything(found.config)
    )
    saved = given("save", ["attention"]) if is_selective else []
    found.require(
        not is_selective or bool(mode and not given("use_reentrant")),
        "selective checkpointing needs gradient_checkpointing true, and use_reentrant false or "
        "left out, as in TRL and axolotl",
    )
    for name in saved:
        found.require(
            name in [*GROUPS],  # a list has no hash
            f"save names {shown(name)}, which is none of {', '.join(GROUPS)}: give a "
            "--recompute-policy with ops(...) instead",
        )
    for name in ("every_n_layers", "offload"):
        if name in found.given and mode in (None, SELECTIVE):
            found.note(f"{name} has no meaning without activation_checkpointing true")
    if "disk" in f"{mode} {everywhere}":
        found.note("offloading to a disk has no counterpart: host memory takes its place")
    rule = WHOLE_LAYERS if given("fsdp") else NOTHING
    if mode == SELECTIVE:
        rule = _operators([*OPERATORS, ROUTER])
    elif mode:
        rule = found.every(given("every_n_layers", 1), "every_n_layers", from_first=True)
        if saved:
            kept = dict.fromkeys(GROUPS[name] for name in saved)
            rule = rule.replace(WHOLE, f"ops({','.join(kept)})")
    if mode in OFFLOADING or everywhere not in (None, HIDDEN):
        return _on_the_host(rule)
    return rule + "@host" * bool(mode and (everywhere or given("offload")))


# --- all systems ---


class System(NamedTuple):
    """A system.

    translate: makes a policy of its settings, or "", and adds other flags to them. tables: those of
    the sections that it reads, of which the first that fits a section counts.
    marks: what only this system has among the lines "PLACE=VALUE" of a config, as a regular
    expression. A mapping's value is "".
    """

    translate: Callable[[Settings], str]
    tables: Sequence[Table]
    marks: str


def _marked(keys: Mapping[str, Key], *shared: str) -> str:
    return "|".join(keys.keys() - {*shared})


ROOT = Table("", {SECTION: Key((dict,)), **SIZED})
SYSTEMS = {
    "torchtune": System(
        from_torchtune,
        # a key on activations that torchtune does not know is an error
        [Table(r"|training|fsdp|training\.fsdp", TORCHTUNE, r"(\w+_)?(ac|activations?)(_\w+)?")],
        rf"(training\.)?({_marked(TORCHTUNE)})=|\w+\._component_=torchtune\.",
    ),
    "torchtitan": System(
        from_torchtitan,
        [
            Table(TITAN_TABLE, TORCHTITAN, ANYWHERE),
            Table("compile", {"enable": Key(name="compiled"), "components": Key((list,))}),
            Table("", {TITAN_TABLE: Key((dict,))}),
        ],
        rf"({TITAN_TABLE}|job)=$",
    ),
    "modalities": System(
        from_modalities,
        [
            Table(
                r"(.+\.)?s?ac_fun_params",
                {"ac_freq": Key((int,)), "save_ops_keys": Key((list,))},
                ANYWHERE,
            ),
            Table(ANYWHERE, MODALITIES),
        ],
        rf"({_marked(MODALITIES, 'ac_fun_params', 'layers_fqn')})=|(\w+\.)?component_key=",
    ),
    "deepspeed": System(
        from_section,
        [
            Table(SECTION, PARTITIONING["deepspeed"], ANYWHERE),
            Table("tensor_parallel", {"autotp_size": Key((int,))}),
            ROOT,
        ],
        "(train_batch_size|train_micro_batch_size_per_gpu|zero_optimization"
        "|zero_allow_untested_optimizer|steps_per_print|wall_clock_breakdown"
        rf"|{SECTION}\.({_marked(PARTITIONING['deepspeed'], 'cpu_checkpointing')}))=",
    ),
    "oslo": System(
        from_section,
        [
            Table(SECTION, PARTITIONING["oslo"], ANYWHERE),
            Table("model_parallelism", SIZED),
            Table("tensor_parallelism", {"parallel_size": SIZED["tensor_parallel_size"]}),
            ROOT,
        ],
        "((model|data|tensor|sequence|pipeline|expert)_parallelism|kernel_fusion"
        "|lazy_initialization|tensor_parallel_size"
        rf"|{SECTION}\.({_marked(PARTITIONING['oslo'], 'cpu_checkpointing')}))=",
    ),
    "hf": System(
        from_hf,
        [
            Table(r"(.+\.)?(gradient|activation)_checkpointing_kwargs", HF_KWARGS, ANYWHERE),
            Table(rf"(.+\.)?{OPS_SAVED}", HF_OPS_SAVED, ANYWHERE),
            Table(r"(.+\.)?fsdp_config", {SECTION: FSDP, f"fsdp_{SECTION}": FSDP}),
            Table(ANYWHERE, HF),
        ],
        rf"(\w+\.)*({_marked(HF, SECTION)})=|(\w+\.)*{SECTION}=\w",
    ),
}


def translated(config: Any, system: str, tp_size: int | None = None) -> Translation:
    """Returns the translation of a config.

    Raises ValueError for a fault in the config, or for an option of another system.
    """
    translate, tables, _ = SYSTEMS[system]
    found = Settings(system, config, tables)
    if tp_size is not None:
        found.require(system in PARTITIONING, "--tp belongs to deepspeed and oslo: leave it out")
        found.give("--tp", tp_size)
    return found.result(translate(found))


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
        for system, row in SYSTEMS.items()
        if any(re.match(row.marks, line) for line in lines)
    )
    undecided = not found and isinstance(config, Mapping) and SECTION in config
    return tuple(PARTITIONING) if undecided else found
