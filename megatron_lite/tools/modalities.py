"""Translates the activation checkpointing of a Modalities config into a recompute policy.

A config of Modalities is a graph of components. Each has a `component_key`, a `variant_key` and a
`config`, and refers to others by `instance_key`. The component that recomputes is one variant of
`model`, wrapped around another model. Three forms can be read: a whole file, one component, and the
`config` of one. The forms of earlier versions can be read too (`FSDP1`, `selective_...`,
`settings`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron_lite.config.policy import LayerAction, Rule
from megatron_lite.tools.translation import (
    ELSEWHERE,
    EVERY,
    MAX_DEPTH,
    OPERATORS,
    ConfigKey,
    ConfigReader,
    Translation,
    named,
    operators,
    shown,
    unit,
)

VARIANTS = (
    "full_activation_checkpointing",
    "selective_layer_activation_checkpointing",
    "selective_op_activation_checkpointing",
)
BY_VARIANT, BY_CLASS = "ac_variant", "activation_checkpointing_modules"
# The variants of the component `model` that recompute. The second is an earlier name of the first.
COMPONENTS = (
    "activation_checkpointed",
    "selective_activation_checkpointed",
    "activation_checkpointed_fsdp1",
)
EARLIER = {"sac_variant": BY_VARIANT, "sac_fun_params": "ac_fun_params"}
# The endings of the names of classes that are whole layers.
LAYER_CLASSES = ("Block", "DecoderLayer", "TransformerLayer", "EncoderLayer")
MLP_CLASSES = ("TransformerMLP", "SwiGLU", "MLP")


SWITCH = "do_apply_activation_checkpointing"
OF_VARIANT = {
    BY_VARIANT: ConfigKey((str,)),
    "ac_fun_params": ConfigKey((Mapping, None)),
    "layers_fqn": ConfigKey((str,), "the policy counts the layers of the model that is trained"),
    "model": ConfigKey((object,)),
}
OF_CLASSES = {
    BY_CLASS: ConfigKey((list, None)),
    "model": ConfigKey((object,)),
    SWITCH: ConfigKey((bool,)),
}
# The parameters of each variant.
PARAMETERS: tuple[dict[str, ConfigKey], ...] = (
    {},
    {"ac_freq": ConfigKey((int,))},
    {"save_ops_keys": ConfigKey((list,))},
)


class Component(NamedTuple):
    """A component of a config.

    place: its place in the file, such as "app_state.config". "" if it is the whole file.
    variant: the `variant_key` of a model. None for any other component.
    """

    place: str
    variant: str | None
    config: Mapping[str, Any]


def is_modalities(config: Any) -> bool:
    """Returns whether the config is clearly one of Modalities."""
    if not isinstance(config, Mapping):
        return False
    own = {BY_VARIANT, BY_CLASS, *EARLIER, "component_key"} & set(config)
    return (
        bool(own)
        or bool(_early_settings(config))
        or any(
            isinstance(value, Mapping) and "component_key" in value and "variant_key" in value
            for value in config.values()
        )
    )


def from_modalities(config: Mapping[str, Any], *, component: str | None = None) -> Translation:
    """Translates a whole config, or one component of it.

    component: the component to read, if the file has several that recompute.
    The layers are those of the model that is trained. `recompute.apply.apply_policy_` takes a
    `layers_fqn` for any other layers. Modalities keeps every second result of aten.mm, whatever the
    config says; `OPERATORS` lists the meaning of the keys. A whole file without a component that
    recomputes is translated to no recomputation. Raises ValueError for a config that Modalities
    would refuse or that has no translation.
    """
    reader = ConfigReader("modalities", config)
    parts = [part for part in _components(config) if part.variant in COMPONENTS]
    found, early = _component(reader, parts, component), _early_settings(config)
    if found is not None:
        given = {EARLIER.get(key, key): value for key, value in found.config.items()}
        places = [found.place] if found.place else list(config)
    else:
        given, places = early, [f"settings.training.{key}" for key in early]
    reader.require(
        bool(given) or is_modalities(config),
        f"there is no component activation_checkpointed, and no {BY_VARIANT}, so nothing is said "
        "of recomputation: choose a --recompute-policy yourself",
    )
    unused = [part.place for part in parts if part.place not in places]
    if not given:
        reader.note("no component activation_checkpointed is in use, so nothing is recomputed")
        reader.note_elsewhere(unused)
        return reader.result(unit(0))
    rule = (
        _of_classes(reader, given)
        if BY_CLASS in given or early is given
        else _of_variant(reader, given)
    )
    for place in unused:
        reader.note(f"the component {named(place)} would recompute too, and is not the one in use")
    if any(part.variant == "compiled" for part in _components(config)):
        reader.note(f"the component compiled is not translated: {ELSEWHERE['compile'][1]}")
    reader.note_elsewhere([*places, *unused])
    return reader.result(rule)


def layers_of(config: Any) -> int | None:
    """Returns the `n_layer` of the model in a whole file, or None unless it has exactly one."""
    try:
        reader = ConfigReader("modalities", config)
        numbers = [
            reader.resolved(part.config["n_layer"], "n_layer")
            for part in _components(config)
            if "n_layer" in part.config
        ]
    except ValueError:
        return None
    models = [number for number in numbers if type(number) is int and number > 0]
    return models[0] if len(models) == len(numbers) and len(set(models)) == 1 else None


def _of_variant(reader: ConfigReader, given: Mapping[str, Any]) -> Rule:
    values = reader.values(given, OF_VARIANT)
    variant, fqn = values.get(BY_VARIANT), values.get("layers_fqn", "layers")
    reader.require(
        variant in VARIANTS,
        f"ac_variant must be one of {', '.join(VARIANTS)} (got {shown(variant)})",
    )
    reader.require(
        all(part.isidentifier() or part.isdigit() for part in fqn.split(".")),
        f"layers_fqn must be a name such as transformer.h (got {shown(fqn)})",
    )
    kind = VARIANTS.index(variant)
    parameters = reader.values(values.get("ac_fun_params") or {}, PARAMETERS[kind])
    if kind == 0:
        return unit(1)
    if kind == 1:
        return reader.every(parameters.get("ac_freq"), "ac_freq")
    keys = parameters.get("save_ops_keys", [])
    reader.require(
        len(keys) > 0,
        "save_ops_keys is empty, and without a result to keep it is full_activation_checkpointing",
    )
    unknown = [key for key in keys if not isinstance(key, str) or key not in OPERATORS]
    reader.require(
        not unknown, f"save_ops_keys must be among {', '.join(OPERATORS)} (got {shown(unknown)})"
    )
    return operators(keys)


def _of_classes(reader: ConfigReader, given: Mapping[str, Any]) -> Rule:
    """Translates `activation_checkpointing_modules`, a list of classes whose modules recompute."""
    values = reader.values(given, OF_CLASSES)
    names = values.get(BY_CLASS) or (["Block"] if values.get(SWITCH) else [])
    layers = {
        name
        for part in _components(reader.config)
        if isinstance(units := part.config.get("block_names"), list)  # FSDP units, so layers
        for name in units
        if isinstance(name, str)
    }
    for name in names:
        reader.require(
            isinstance(name, str)
            and (name in layers or name.endswith(LAYER_CLASSES) or name in MLP_CLASSES),
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


def _component(
    reader: ConfigReader, parts: list[Component], wanted: str | None
) -> Component | None:
    """Returns the component that recomputes, or None if the file has none.

    If the file has several, `wanted` must choose one of them.
    """
    config = reader.config
    if "component_key" not in config and {BY_VARIANT, BY_CLASS, *EARLIER} & set(config):
        reader.require(
            wanted is None, f"there is no component {shown(wanted)}: the file is the config of one"
        )
        return Component("", None, config)
    found = {part.place: part for part in parts}
    if wanted is not None:
        reader.require(
            wanted in found,
            f"no component {shown(wanted)} recomputes (these do: {named(*found) or 'none'})",
        )
        return found[wanted]
    if "app_state" in config:
        in_use = _reached(config, "app_state")
        found = {place: part for place, part in found.items() if place in in_use}
    reader.require(
        len(found) < 2, f"several components recompute ({named(*found)}): give --component NAME"
    )
    return next(iter(found.values()), None)


def _components(config: Any, place: str = "", depth: int = MAX_DEPTH) -> Iterator[Component]:
    """Yields every component in the file, also those inside another one."""
    if depth == 0 or not isinstance(config, (Mapping, list)):
        return
    if (
        isinstance(config, Mapping)
        and "component_key" in config
        and isinstance(config.get("config"), Mapping)
    ):
        variant = config.get("variant_key")
        of_model = config["component_key"] == "model" and isinstance(variant, str)
        yield Component(place, variant if of_model else None, config["config"])
    below = config.items() if isinstance(config, Mapping) else enumerate(config)
    for key, value in below:
        yield from _components(value, f"{place}.{key}" if place else str(key), depth - 1)


def _reached(config: Mapping[str, Any], start: str) -> set[str]:
    """Returns the places that the component `start` reaches by reference, directly or not."""
    reached: set[str] = set()
    waiting: list[tuple[str, Any]] = [(start, config.get(start))]
    while waiting:
        place, value = waiting.pop()
        if place in reached:
            continue
        reached.add(place)
        if isinstance(value, Mapping):
            name = value.get("instance_key")
            if isinstance(name, str) and name in config:
                waiting.append((name, config[name]))
            waiting += [(f"{place}.{key}", below) for key, below in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{place}.{number}", below) for number, below in enumerate(value)]
    return reached


def _early_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of the earliest files, which are in `settings` and not in a component."""
    settings = config.get("settings")
    training = settings.get("training") if isinstance(settings, Mapping) else None
    if not isinstance(training, Mapping):
        return {}
    return {key: training[key] for key in (BY_CLASS, SWITCH) if key in training}
