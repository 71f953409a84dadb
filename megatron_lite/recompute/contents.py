"""The parts of any object in one flat sequence, by which two moments of it are compared."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron_lite.parallel.torch_internals import tree_leaves
from megatron_lite.recompute.own_generators import GeneratorState, is_generator
from megatron_lite.recompute.versions import version_of

MAX_PARTS = 10_000  # how many parts of an object are compared
CONSTANT = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
    type,
    Enum,
    nn.Module,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
)

LIBRARIES = frozenset({"torch", "megatron_lite", "functools"})  # their objects are not looked into


def has_attributes(value: Any) -> bool:
    """Tells whether the value is an object of Python whose state is its attributes."""
    return (
        type(getattr(value, "__dict__", None)) is dict
        and not isinstance(value, (*CONSTANT, Tensor, np.ndarray))
        and not is_generator(value)
        and type(value).__module__.partition(".")[0] not in LIBRARIES
    )


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors in nested containers."""
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


class Value(NamedTuple):
    """A tensor inside an object, and its version."""

    tensor: Tensor
    version: int | None


def contents(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yields the parts of an object in one flat sequence: attributes and items, and their parts.

    Each tensor comes with its version, an array and a generator with a hash. Types and numbers of
    parts are included, so that equal sequences mean equal structures.
    """
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield Value(value, version_of(value))
        return
    if isinstance(value, CONSTANT) or id(value) in seen or len(seen) >= MAX_PARTS:
        yield value
        return
    seen.add(id(value))
    yield type(value)
    if isinstance(value, np.ndarray):
        yield hash((value.shape, value.tobytes()))
        return
    if is_generator(value):
        state = GeneratorState.of(value).state
        yield from contents(state.numpy() if isinstance(state, Tensor) else state, set())
        return
    if type(value).__module__.partition(".")[0] in LIBRARIES:
        return
    parts = list(_parts(value))
    yield len(parts)
    for part in parts:
        yield from contents(part, seen)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for item in value.items():
            yield from item
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    named = dict(getattr(value, "__dict__", {}))
    named |= {
        name: getattr(value, name)
        for kind in type(value).__mro__
        for name in getattr(kind, "__slots__", ())
        if hasattr(value, name)
    }
    for attribute in named.items():
        yield from attribute


def same(before: list[Any], now: list[Any]) -> bool:
    """Tells whether two sequences of `contents` are equal."""
    return len(before) == len(now) and all(map(_equal, before, now))


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Value):
        return one.tensor is other.tensor and one.version == other.version
    return isinstance(one, (bool, int, float, complex, str, bytes)) and bool(one == other)
