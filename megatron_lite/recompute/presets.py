"""Activation checkpointing as torchtune, torchtitan, Modalities, DeepSpeed and OSLO write it, translated into a recompute policy.

Each `from_...` takes the values of that system's own config file and returns the flags to give here, with a note for every value
that has no counterpart. What the original refuses is a ValueError, and so is a key or a type that it does not know, which most of
them pass over in silence. `docs/coming-from.md` has a table per system; the command is `tools/translate_recompute.py`.

Two things are the same for all of them. Every n-th layer counts from the n-th on, so n = 2 are the layers 1, 3, 5 of a stage, by
their number: torchtune, torchtitan and Modalities count calls with one counter per process, which a second model carries on.
And a replay always draws the dropout masks of its forward, also where the original would not restore the generators.
"""

from __future__ import annotations

import reprlib
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_lite.config.policy import Action, Layers, Policy, Rule

MAX_STEP = 999_999
EVERY = (Layers(),)
KEEP, ALL = (Policy((Rule(layers=EVERY, action=Action(unit=unit)),)) for unit in (0, 1))
# What 'op' keeps in torchtitan and, by their keys, in Modalities. Their lists name single kernels: aten.mm but not aten.addmm, so
# that every linear with a bias is rebuilt, and no attention kernel of a CPU. The groups here hold all kernels of a kind.
OPERATORS = {
    "ops.aten.mm.default": "matmul/2",
    "ops.aten._scaled_dot_product_efficient_attention.default": "attention",
    "ops.aten._scaled_dot_product_flash_attention.default": "attention",
    "ops._c10d_functional.reduce_scatter_tensor.default": "collective",
    "ops.aten.max.default": "max",
}
NONE, WHOLE, SELECTIVE, BUDGET = "none", "full", "selective", "memory_budget"
VARIANTS = ("full_activation_checkpointing", "selective_layer_activation_checkpointing", "selective_op_activation_checkpointing")


class Translation(NamedTuple):
    """What to run with: a policy, or a budget for compiled layers. notes: a line for each value that changes nothing here."""

    policy: Policy
    contiguous_saved_activations: bool = False
    activation_memory_budget: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """The same as words of a command line."""
        if self.activation_memory_budget is not None:
            return ("--torch-compile", "--activation-memory-budget", str(self.activation_memory_budget))
        contiguous = ("--contiguous-saved-activations",) if self.contiguous_saved_activations else ()
        return ("--recompute-policy", str(self.policy), *contiguous)


def from_torchtune(recipe: Mapping[str, Any]) -> Translation:
    """From the keys `enable_activation_checkpointing`, `ac_mode`, `ac_option`, `enable_activation_offloading` of a recipe.

    With both of the first two set, torchtune applies neither: here `ac_mode` says how. Its `ac_option` 'op' was never built:
    here it is what torchtitan's is. Offloading moves what every layer saves, whether the layer is rebuilt or not.
    """
    given = _read(recipe, "torchtune", enable_activation_checkpointing=bool, ac_mode=(str, type(None)),
                  ac_option=(int, str, type(None)), enable_activation_offloading=bool, activation_offloading_use_streams=bool)
    enabled, mode = given.get("enable_activation_checkpointing", False), given.get("ac_mode")
    _require(mode in (None, NONE, WHOLE, SELECTIVE), f"torchtune: ac_mode must be none, full or selective (got {_shown(mode)})")
    _require(not (enabled and mode == NONE),
             "torchtune: enable_activation_checkpointing true and ac_mode none contradict each other: leave one of them out")
    mode = mode or (WHOLE if enabled else NONE)
    notes = _without_counterpart("torchtune", given, activation_offloading_use_streams="copies overlap wherever the device can")
    if given.get("ac_option") is not None and mode != SELECTIVE:
        notes += (f"torchtune: ac_option has no meaning with ac_mode {mode}",)
    offloaded = given.get("enable_activation_offloading", False)
    _require(enabled or not offloaded, "torchtune: enable_activation_offloading needs enable_activation_checkpointing true")
    rule = _selected("torchtune", mode, "ac_option", given.get("ac_option"))
    if not offloaded:
        return Translation(Policy((rule,)), notes=notes)
    others = (Rule(layers=EVERY, action=Action(), store="host"),) if rule.layers != EVERY else ()
    return Translation(Policy((replace(rule, store="host"), *others)), notes=notes)


def from_torchtitan(config: Mapping[str, Any]) -> Translation:
    """From the table `activation_checkpoint` of a job config. Without `mode` it is selective, without an option every 2nd layer.

    `selective_ac_option` 'op' keeps every second matrix multiplication. torchtitan counts aten.mm alone, so that a linear with
    a bias is always rebuilt; here each counts. `memory_budget` needs the table `compile` with `enable`; here it compiles each
    layer too, see training/compiler.py.
    """
    given = _read(_section(config, "torchtitan", "activation_checkpoint"), "torchtitan: activation_checkpoint", mode=str,
                  selective_ac_option=(int, str), per_op_sac_force_recompute_mm_shapes_by_fqns=list, early_stop=bool,
                  memory_budget=(int, float), visualize_memory_budget_pareto=bool, preserve_rng_state=bool, determinism_check=str,
                  debug=bool)
    mode = given.get("mode", SELECTIVE)
    _require(mode in (NONE, WHOLE, SELECTIVE, BUDGET),
             f"torchtitan: mode must be none, full, selective or memory_budget (got {_shown(mode)})")
    option = given.get("selective_ac_option", "2")
    shapes = [name for name in given.get("per_op_sac_force_recompute_mm_shapes_by_fqns", ()) if name != "moe.router.gate"]
    _require(not (shapes and mode == SELECTIVE and option == "op"), "torchtitan: per_op_sac_force_recompute_mm_shapes_by_fqns "
             f"{_shown(shapes)} is not translated: ops(...) tells operators apart, not their shapes")
    notes = _without_counterpart(
        "torchtitan", given, early_stop="a replay leaves out its last matmul unless --no-recompute-tail-skip is given",
        visualize_memory_budget_pareto="it draws what the compiler could do, and trains no differently",
        preserve_rng_state="replays always restore the generators", determinism_check="--recompute-verify compares values",
        debug="--recompute-verify names the layer and the tensor that differ")
    if mode != BUDGET:
        notes += _without_counterpart("torchtitan", given, memory_budget=f"it has no meaning with mode {mode}")
        return Translation(Policy((_selected("torchtitan", mode, "selective_ac_option", option),)), notes=notes)
    compiler = config.get("compile", {})
    _require(isinstance(compiler, Mapping) and compiler.get("enable") is True,
             "torchtitan: mode memory_budget needs the table compile with enable true: the budget is torch.compile's")
    budget = given.get("memory_budget", 0.5)
    _require(0 <= budget <= 1, f"torchtitan: memory_budget must be from 0 to 1 (got {_shown(budget)})")
    return Translation(KEEP, activation_memory_budget=float(budget), notes=notes)


def from_modalities(config: Mapping[str, Any]) -> Translation:
    """From the config of the component activation_checkpointed: `ac_variant`, `ac_fun_params`, `layers_fqn`.

    The layers are those of the model that is trained; `recompute.apply.apply_policy_` takes a `layers_fqn` for any other.
    Of aten.mm Modalities keeps every second result, whatever the config says; see `OPERATORS` for what the keys stand for.
    """
    given = _read(config, "modalities", ac_variant=str, ac_fun_params=(Mapping, type(None)), layers_fqn=str, model=object)
    variant, fqn = given.get("ac_variant"), given.get("layers_fqn", "layers")
    _require(variant in VARIANTS, f"modalities: ac_variant must be one of {', '.join(VARIANTS)} (got {_shown(variant)})")
    _require(all(part.isidentifier() or part.isdigit() for part in fqn.split(".")),
             f"modalities: layers_fqn must be a name such as transformer.h (got {_shown(fqn)})")
    notes = _without_counterpart("modalities", given, layers_fqn="the policy counts the layers of the model that is trained")
    parameters, where = given.get("ac_fun_params") or {}, f"modalities: ac_fun_params of {variant}"
    if variant == VARIANTS[0]:
        _read(parameters, where)
        return Translation(ALL, notes=notes)
    if variant == VARIANTS[1]:
        step = _read(parameters, where, ac_freq=int).get("ac_freq")
        return Translation(Policy((_every(step, f"{where}: ac_freq"),)), notes=notes)
    keys = _read(parameters, where, save_ops_keys=list).get("save_ops_keys", [])
    _require(len(keys) > 0, f"{where}: save_ops_keys is empty, and without a result to keep it is full_activation_checkpointing")
    unknown = [key for key in keys if not isinstance(key, str) or key not in OPERATORS]
    _require(not unknown, f"{where}: save_ops_keys must be among {', '.join(OPERATORS)} (got {_shown(unknown)})")
    return Translation(Policy((_operators(keys),)), notes=notes)


def from_deepspeed(config: Mapping[str, Any], *, tp_size: int) -> Translation:
    """From a DeepSpeed config, of which only the section `activation_checkpointing` is read.

    The section says where the input of each checkpoint lives; which layers are checkpoints is up to the code that calls
    DeepSpeed. Here every layer is one. DeepSpeed partitions in place, so that in evaluation the caller is left with a shard, and
    its contiguous memory is a list of tensors that runs over unless `reset()` is called; here the caller's tensor is never
    touched, and one buffer is sized by the plan, without `number_checkpoints`. To partition over one rank is an error; there it
    does nothing.
    """
    section = _section(config, "deepspeed", "activation_checkpointing")
    given = _read(section, "deepspeed: activation_checkpointing", partition_activations=bool, cpu_checkpointing=bool,
                  contiguous_memory_optimization=bool, number_checkpoints=(int, type(None)),
                  synchronize_checkpoint_boundary=bool, profile=bool)
    count = given.get("number_checkpoints")
    _require(count is None or count >= 1, f"deepspeed: number_checkpoints must be at least 1 or null (got {_shown(count)})")
    notes = _without_counterpart(
        "deepspeed", given, number_checkpoints="the buffer is sized by the plan",
        synchronize_checkpoint_boundary="nothing waits for the device within a step",
        profile="--memory-timeline shows the replays of a step")
    return _stored("deepspeed", given, ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"), tp_size,
                   notes)


def from_oslo(config: Mapping[str, Any], *, tp_size: int) -> Translation:
    """From an OSLO config, of which only the section `activation_checkpointing` is read. Without `enable`, nothing is rebuilt.

    OSLO partitions in place, and its contiguous memory is a list of tensors: see `from_deepspeed`.
    """
    section = _section(config, "oslo", "activation_checkpointing")
    names = ("partitioned_checkpointing", "cpu_checkpointing", "contiguous_checkpointing")
    given = _read(section, "oslo: activation_checkpointing", enable=bool, **dict.fromkeys(names, bool))
    if given.get("enable", False):
        return _stored("oslo", given, names, tp_size, ())
    return Translation(KEEP, notes=tuple(f"oslo: {name} does nothing without enable true" for name in names if given.get(name)))


def _selected(system: str, mode: str, key: str, option: object) -> Rule:
    """What the modes of torchtune and torchtitan do. option: of selective, a number, also as text, or 'op'."""
    if mode != SELECTIVE:
        return Rule(layers=EVERY, action=Action(unit=1 if mode == WHOLE else 0))
    if option == "op":
        return _operators(OPERATORS)
    if isinstance(option, str) and option.isascii() and option.isdigit() and len(option) <= len(str(MAX_STEP)):
        option = int(option)
    _require(isinstance(option, int), f"{system}: {key} of selective must be 'op' or a number of layers (got {_shown(option)})")
    return _every(option, f"{system}: {key}")


def _every(step: object, where: str) -> Rule:
    """Every step-th layer is a unit, as the originals count: the last of each `step` layers."""
    if not isinstance(step, int) or not 1 <= step <= MAX_STEP:
        raise ValueError(f"{where} must be from 1, which is every layer, to {MAX_STEP} (got {_shown(step)})")
    return Rule(layers=(Layers(step - 1, None, step),), action=Action(unit=1))


def _operators(keys: Container[str]) -> Rule:
    """Of every layer the results of these are kept."""
    ops = dict.fromkeys(name for key, name in OPERATORS.items() if key in keys)
    return Rule(layers=EVERY, action=Action(ops=tuple(ops)))


def _stored(system: str, given: Mapping[str, Any], names: tuple[str, str, str], tp_size: int,
            notes: tuple[str, ...]) -> Translation:
    """Every layer a unit. names: the keys for 1/t of its input on each rank, host memory, and one buffer."""
    split, host, contiguous = (given.get(name, False) for name in names)
    _require(tp_size >= 1, f"the tensor-parallel size must be at least 1 (got {tp_size})")
    _require(split or not contiguous, f"{system}: {names[2]} needs {names[0]} true")
    _require(tp_size > 1 or not split, f"{system}: {names[0]} needs a tensor-parallel size > 1 (got {tp_size})")
    store = "+".join(word for word, wanted in (("split", split), ("host", host)) if wanted) or "device"
    return Translation(Policy((Rule(layers=EVERY, action=Action(unit=1), store=store),)), contiguous, notes=notes)


def _section(config: Mapping[str, Any], system: str, name: str) -> Any:
    _require(isinstance(config, Mapping), f"{system}: expected an object, got {_shown(config)}")
    _require(name in config, f"{system}: there is no section {name}, so nothing is said of recomputation")
    return config[name]


def _read(section: Any, where: str, **kinds: Any) -> dict[str, Any]:
    """The values of the known keys. ValueError for another key, and for a value that is of none of the key's types."""
    _require(isinstance(section, Mapping), f"{where}: expected an object, got {_shown(section)}")
    unknown = [key for key in section if key not in kinds]
    _require(not unknown, f"{where}: unknown key {_shown(unknown[0] if unknown else None)} (known: {', '.join(kinds) or 'none'})")
    for key, value in section.items():
        allowed = kinds[key] if isinstance(kinds[key], tuple) else (kinds[key],)
        fits = type(value) is bool if bool in allowed else isinstance(value, allowed) and type(value) is not bool
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
        _require(fits, f"{where}: {key} must be {names} (got {_shown(value)})")
    return dict(section)


def _without_counterpart(system: str, given: Mapping[str, Any], **reasons: str) -> tuple[str, ...]:
    """A note for each of these values that was given and is neither off nor the default."""
    return tuple(f"{system}: {key} has no counterpart: {reason}" for key, reason in reasons.items()
                 if given.get(key) not in (None, False, "default"))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _shown(value: object) -> str:
    """One line, however large the value."""
    return reprlib.repr(value)
