"""Translates the activation checkpointing of torchtune recipes. translators.py has the rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_lite.config.policy import LayerAction, Policy, Rule
from megatron_lite.tools.torchtitan import NONE, SELECTIVE, WHOLE, selected
from megatron_lite.tools.translation import (
    EVERY,
    Translation,
    mapping,
    notes_elsewhere,
    require,
    shown,
    typed,
    without_counterpart,
)

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
RECOMPUTATION = re.compile(r"(^|_)ac(_|$)|activation")


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
    rules = (selected("torchtune", mode, "ac_option", given.get("ac_option")),)
    if offloaded:
        others = (
            (Rule(layers=EVERY, action=LayerAction(), store="host"),)
            if rules[0].layers != EVERY
            else ()
        )
        rules = (replace(rules[0], store="host"), *others)
    return Translation(Policy(rules), notes=notes, fsdp_memory_efficient_wrapping=wrapped)


def is_torchtune(config: Mapping[str, Any]) -> bool:
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
