"""The parts from which a family of Hugging Face models is described, and how values are read.

A family maps a config.json to the fields of ModelConfig and back. The same description serves both
directions. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_lite.config.json_text import shown
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.plain import MOST_LAYERS


class Key(NamedTuple):
    """A key of a config that is a field.

    default: the value that transformers takes if the key is missing; a key with REQUIRED must be
        there.
    """

    field: str
    kind: type
    default: Any


class Only(NamedTuple):
    """A key with the only values that can be mapped. reason: why others cannot.

    The last value is the one that an exported config has.
    """

    values: tuple[Any, ...]
    reason: str


class KeyRule(NamedTuple):
    """A fact of a model that is not one key.

    read: sets fields from a config, in a dict. It returns notes about what changes no size and
        still changes results, which is left out.
    write: returns the keys of a config that express the model. They need not express it exactly,
        because an export reads them back and compares.
    keys: the keys that `read` reads.
    """

    read: Callable[[Mapping[str, Any], dict[str, Any]], list[str]]
    write: Callable[[ModelConfig], dict[str, Any]]
    keys: tuple[str, ...]


class TensorNames(NamedTuple):
    """Modules that hold the parts of one module here, and the layout of their tensors.

    layout: a key of `LAYOUTS` in convert/hf_layouts.py.
    """

    theirs: tuple[str, ...]
    layout: str = "same"


class FamilyTensors(NamedTuple):
    """The names of a family's modules, each by the name of the module here.

    base: the prefix of all tensors but those of the head. Files of a model that was saved without
        its head lack it.
    head: the module of the untied output weight.
    outer: the modules outside of a layer, without the base.
    layer: the place of a layer below the base, and its modules.
    """

    base: str
    head: str
    outer: Mapping[str, str | TensorNames]
    layer: tuple[str, Mapping[str, str | TensorNames]]


class FamilyKeys(NamedTuple):
    """One model_type.

    architecture: the class of transformers that holds the model with its head.
    keys, only, fields: what a key becomes, what it must be, and what all members have in common.
    tensors: the names of its weights, which the converter reads.
    """

    architecture: str
    keys: Mapping[str, Key]
    only: Mapping[str, Only]
    fields: Mapping[str, Any]
    rules: tuple[KeyRule, ...]
    tensors: FamilyTensors


REQUIRED = object()
LAYER_KEYS = frozenset({"num_hidden_layers", "n_layer"})
MOST_SIZE = 2**40  # larger than any size of a model


def value_of(config: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """Returns a value of the config with its type checked. null counts as missing."""
    value = config.get(key)
    if value is None:
        if default is REQUIRED:
            raise ValueError(f"{key} is missing")
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{key} must be of type {kind.__name__} (got {shown(repr(value))})")
    most = MOST_LAYERS if key in LAYER_KEYS else MOST_SIZE
    if isinstance(value, (int, float)) and not -most <= value <= most:
        raise ValueError(f"{key} must be at most {most} (got {shown(repr(value))})")
    return value


def whole_number(config: Mapping[str, Any], key: str, default: int) -> int:
    """Returns a number that may be written as a float but must be whole."""
    value = config.get(key, default)
    if type(value) not in (int, float) or not math.isfinite(value) or value != int(value):
        raise ValueError(f"{key} must be a whole number (got {shown(repr(value))})")
    if abs(value) > MOST_SIZE:
        raise ValueError(f"{key} must be at most {MOST_SIZE} (got {shown(repr(value))})")
    return int(value)


def object_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns an object inside a config; {} if it is missing."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be an object (got {shown(repr(value))})")
    return value
