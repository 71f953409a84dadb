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

from megatron_lite.config.policy import LayerAction, Policy, Rule
from megatron_lite.tools.translation import (
    ALL,
    ELSEWHERE,
    EVERY,
    KEEP,
    MAX_DEPTH,
    OPERATORS,
    Translation,
    every,
    mapping,
    named,
    notes_elsewhere,
    operators,
    require,
    resolved,
    shown,
    typed,
    without_counterpart,
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
        or _early_settings(config) is not None
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
    mapping(config, "modalities")
    found = _component(config, component)
    if found is None:
        early = _early_settings(config)
        require(
            early is not None or is_modalities(config),
            f"modalities: there is no component activation_checkpointed, and no {BY_VARIANT}, so "
            "nothing is said of recomputation: choose a --recompute-policy yourself",
        )
        if early is None:
            nothing = (
                "modalities: no component activation_checkpointed is in use, so nothing is "
                "recomputed"
            )
            unused = [part.place for part in _components(config) if part.variant in COMPONENTS]
            return Translation(
                KEEP, notes=(nothing, *notes_elsewhere("modalities", config, unused))
            )
        translation = _of_classes(early, config)
        places = [f"settings.training.{key}" for key in early]
    else:
        given = {EARLIER.get(key, key): value for key, value in found.config.items()}
        translation = (
            _of_classes(given, config) if BY_CLASS in given else _of_variant(given, config)
        )
        places = [found.place] if found.place else list(config)
    unused = [
        part.place
        for part in _components(config)
        if part.variant in COMPONENTS and part.place not in places
    ]
    notes = [
        f"modalities: the component {named(place)} would recompute too, and is not the one in use"
        for place in unused
    ]
    if any(part.variant == "compiled" for part in _components(config)):
        notes.append(
            f"modalities: the component compiled is not translated: {ELSEWHERE['compile'][1]}"
        )
    notes += notes_elsewhere("modalities", config, [*places, *unused])
    return translation._replace(notes=(*translation.notes, *notes))


def layers_of(config: Any) -> int | None:
    """Returns the `n_layer` of the model in a whole file, or None unless it has exactly one."""
    try:
        numbers = [
            resolved(part.config["n_layer"], config, "n_layer")
            for part in _components(config)
            if "n_layer" in part.config
        ]
    except ValueError:
        return None
    models = [number for number in numbers if type(number) is int and number > 0]
    return models[0] if len(models) == len(numbers) and len(set(models)) == 1 else None


def _of_variant(given: Mapping[str, Any], file: Any) -> Translation:
    values = typed(
        given,
        "modalities",
        file=file,
        ac_variant=str,
        ac_fun_params=(Mapping, type(None)),
        layers_fqn=str,
        model=object,
    )
    variant, fqn = values.get(BY_VARIANT), values.get("layers_fqn", "layers")
    require(
        variant in VARIANTS,
        f"modalities: ac_variant must be one of {', '.join(VARIANTS)} (got {shown(variant)})",
    )
    require(
        all(part.isidentifier() or part.isdigit() for part in fqn.split(".")),
        f"modalities: layers_fqn must be a name such as transformer.h (got {shown(fqn)})",
    )
    notes = without_counterpart(
        "modalities", values, layers_fqn="the policy counts the layers of the model that is trained"
    )
    parameters, where = values.get("ac_fun_params") or {}, f"modalities: ac_fun_params of {variant}"
    if variant == VARIANTS[0]:
        typed(parameters, where)
        return Translation(ALL, notes=notes)
    if variant == VARIANTS[1]:
        step = typed(parameters, where, file=file, ac_freq=int).get("ac_freq")
        return Translation(Policy((every(step, f"{where}: ac_freq"),)), notes=notes)
    keys = typed(parameters, where, file=file, save_ops_keys=list).get("save_ops_keys", [])
    require(
        len(keys) > 0,
        f"{where}: save_ops_keys is empty, and without a result to keep it is "
        "full_activation_checkpointing",
    )
    unknown = [key for key in keys if not isinstance(key, str) or key not in OPERATORS]
    require(
        not unknown,
        f"{where}: save_ops_keys must be among {', '.join(OPERATORS)} (got {shown(unknown)})",
    )
    return Translation(Policy((operators(keys),)), notes=notes)


def _of_classes(given: Mapping[str, Any], file: Any) -> Translation:
    """Translates `activation_checkpointing_modules`, a list of classes whose modules recompute."""
    values = typed(
        given,
        "modalities",
        file=file,
        activation_checkpointing_modules=(list, type(None)),
        model=object,
        do_apply_activation_checkpointing=bool,
    )
    names = values.get(BY_CLASS) or (
        ["Block"] if values.get("do_apply_activation_checkpointing") else []
    )
    layers = set(_block_names(file))
    for name in names:
        known = isinstance(name, str) and (
            name in layers or name.endswith(LAYER_CLASSES) or name in MLP_CLASSES
        )
        require(
            known,
            f"modalities: {BY_CLASS}: {shown(name)} is no class of a whole layer (such as "
            f"GPT2Block, or a name in block_names) nor of its MLP ({', '.join(MLP_CLASSES)}); give "
            "a --recompute-policy with regions instead",
        )
    if not names:
        return Translation(KEEP)
    if all(name in MLP_CLASSES for name in names):
        return Translation(Policy((Rule(layers=EVERY, action=LayerAction(regions=("mlp",))),)))
    inner = [name for name in names if name in MLP_CLASSES]
    notes = tuple(
        f"modalities: {BY_CLASS}: {name} is part of a layer, and layers are recomputed whole"
        for name in inner
    )
    return Translation(ALL, notes=notes)


def _component(config: Mapping[str, Any], wanted: str | None) -> Component | None:
    """Returns the component that recomputes, or None if the file has none.

    Raises ValueError if the file has several and `wanted` does not choose one of them.
    """
    if "component_key" not in config and {BY_VARIANT, BY_CLASS, *EARLIER} & set(config):
        require(
            wanted is None,
            f"modalities: there is no component {shown(wanted)}: the file is the config of one",
        )
        return Component("", None, config)
    found = {part.place: part for part in _components(config) if part.variant in COMPONENTS}
    if wanted is not None:
        require(
            wanted in found,
            f"modalities: no component {shown(wanted)} recomputes (these do: "
            f"{named(*found) or 'none'})",
        )
        return found[wanted]
    if "app_state" in config:
        in_use = _reached(config, "app_state")
        found = {place: part for place, part in found.items() if place in in_use}
    require(
        len(found) < 2,
        f"modalities: several components recompute ({named(*found)}): give --component NAME",
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


def _block_names(config: Any) -> Iterator[str]:
    """Yields the classes of layers that the file shards as one FSDP unit each."""
    for part in _components(config):
        names = part.config.get("block_names")
        yield from (
            name for name in (names if isinstance(names, list) else []) if isinstance(name, str)
        )


def _early_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the keys of the earliest files, which are in `settings` and not in a component."""
    settings = config.get("settings")
    training = settings.get("training") if isinstance(settings, Mapping) else None
    keys = (BY_CLASS, "do_apply_activation_checkpointing")
    given = (
        {key: training[key] for key in keys if key in training}
        if isinstance(training, Mapping)
        else {}
    )
    return given or None
