"""All that a layer or an argument holds: its containers, tensors, arrays and generators.

`Contents` is what one moment finds. Three modules read it: layer_state.py restores for a replay
what a layer held before its forward, witness.py compares a layer before and after a replay, and
call_arguments.py finds arguments that a forward changed.

The attributes of a module or of an object of Python are a dictionary, so they are a container like
a list. Restoring refills the containers themselves: their holders, and handles that remove a hook,
go on referring to them.
"""

from __future__ import annotations

import dis
import sys
import types
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import copy
from copyreg import _slotnames  # type: ignore[attr-defined]
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache, partial
from itertools import chain
from operator import is_, itemgetter
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.parallel.tensor_hash import Hashes, hash_once, quick_hash, read
from megatron_lite.parallel.torch_internals import (
    disable_current_modes,
    tree_leaves,
    without_torch_function,
)

from .randomness import ARRAYS, GeneratorState, is_generator
from .saved import version_of

MAX_PARTS = 10_000  # so many parts of Python objects are looked at
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
CONSTANT = (
    *PLAIN,
    torch.dtype,
    torch.device,
    torch.Size,
    type,
    Enum,
    types.BuiltinFunctionType,
    types.ModuleType,
    Thread,  # it changes by itself
)
UNSET = object()  # in the place of a slot without a value
CONTAINERS = (OrderedDict, dict, list, tuple, set, frozenset, deque)
USUAL = frozenset({dict, list, set, deque, OrderedDict, defaultdict, Counter})
# The objects of these are not looked into. Those of trainers hold datasets and optimizers, those of
# compilers what they measured.
LIBRARIES = {"torch", "megatron_lite", "accelerate", "deepspeed", "lightning", "pytorch_lightning"}
LIBRARIES |= {"triton", "numba", "numpy", "logging"}
# What wraps functions is of these classes or of functools, and holds them by these names.
WRAPPERS = types.FunctionType, types.MethodType, staticmethod, classmethod, property
WRAPPED = ("__func__", "fget", "fset", "__wrapped__", "func")
RECORDS = {"types", "argparse", "collections"}  # parts of Python with classes of plain objects
STANDARD = frozenset(vars(nn.Module()))  # the attributes of every module
HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("hooks"))
# What functions hold besides their code. A cell is a variable of the function around one.
FUNCTIONS: dict[type, tuple[str, ...]] = {
    types.FunctionType: ("__closure__", "__defaults__", "__kwdefaults__"),
    types.MethodType: ("__self__", "__func__"),
    types.CellType: ("cell_contents",),
    partial: ("func", "args", "keywords"),
}


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors in nested containers."""
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Returns the shape of a tensor, of a nested one that of its values: each jagged tensor has a
    length of its own, which is equal to no other."""
    return tuple((tensor.detach().values() if tensor.is_nested else tensor).shape)


@contextmanager
def unobserved() -> Iterator[None]:
    """Hides operations from modes and from autograd: they are no part of the function."""
    with torch.no_grad(), disable_current_modes(), without_torch_function():
        yield


def behind(value: Any) -> Any:
    """Returns what a weak reference refers to, and the object of a method of C, such as the list of
    `aux.append`; of all else the value itself."""
    if isinstance(value, weakref.ref):
        return value()
    if type(value) is types.BuiltinMethodType and isinstance(value.__self__, CONTAINERS):
        return value.__self__
    return value


def hash_last(tensors: list[Tensor], known: Hashes, weights: Any) -> list[Tensor]:
    """Returns the hashes of the four tensors that a replay saved last, when it might stop, and of
    the weights, any iterable of tensors."""
    with unobserved():
        return [*[hash_once(each, known) for each in tensors[-4:]], *map(quick_hash, weights)]


@dataclass(slots=True, eq=False)
class Names:
    """Variables of a module or a class, as a container.

    held: all of them. names: those that may change. put: binds one again.
    """

    held: Any
    names: dict[str, None]
    put: Any


@dataclass(frozen=True)
class Value:
    """The value of a tensor, without its graph, and its version."""

    tensor: Tensor
    version: int | None


class Part(NamedTuple):
    """A tensor or an array, or a container with its items at one moment, as `_items` gives them.

    name: its name within the layer or argument.
    owner: the name of the object of Python that holds it; "" if a module does.
    """

    name: str
    owner: str
    value: Any
    items: Any = ()


class Contents:
    """What a value holds at one moment. Each container, tensor and generator is found once.

    objects: whether the objects of Python that modules hold are looked into, their functions, and
        modules that are not inside the layer.
    constant: further kinds that are never looked into.
    has_graphs: whether a tensor may have the graph of an earlier result.
    modes: the classes of the modules of a layer, and whether each is in training.
    found: all items of all containers, with their numbers and the classes of modules, if modules
        hold nothing besides containers and tensors without a graph. Else None.
    """

    layer: nn.Module
    modes: tuple[Any, ...] = ()
    _held: list[Any]
    _others: list[Part]

    def __init__(self, objects: bool = True, constant: tuple[type, ...] = ()) -> None:
        self._objects, self._known, self._room = objects, set[int](), MAX_PARTS
        self._constant = CONSTANT + constant
        self._modules = set[nn.Module]()
        self._is_odd = self.has_graphs = False
        self.containers: list[Part] = []
        self._empty: list[tuple[str, Any]] = []  # most dictionaries of modules
        self.parts: dict[str, Part] = {}
        self.generators: list[tuple[str, GeneratorState]] = []  # each with its owner
        self.found: Any = None

    @classmethod
    def of_layer(cls, layer: nn.Module, objects: bool = True) -> Contents:
        """Returns what the modules of a layer hold."""
        contents = cls(objects)
        contents.layer = layer
        contents.modes = tuple(
            (type(each), getattr(each, "training", None)) for each in layer.modules()
        )
        contents._add_modules("", layer)
        if not (contents._is_odd or contents.has_graphs or contents.generators):
            held = [each.value for each in contents.containers if type(each.value) in USUAL]
            contents._held = [*held, *[each.values() for each in held if isinstance(each, dict)]]
            contents._others = [
                each for each in contents.containers if each.items and type(each.value) not in USUAL
            ]
            contents.found = contents._shape(), [*chain.from_iterable(contents._held)]
        return contents

    def _shape(self) -> Any:
        return [*map(len, self._held)], [*map(type, self._modules)]

    def is_as_found(self) -> bool:
        """Tells whether all containers have their items still, as far as `found` shows it."""
        if self.found is None or any(map(itemgetter(1), self._empty)):
            return False
        shape, items = self.found
        is_so = shape == self._shape() and all(map(is_, items, chain.from_iterable(self._held)))
        return is_so and all(_has(value, items) for _, _, value, items in self._others)

    def again(self, layer: Any) -> Contents | None:
        """Returns what the modules of a layer hold, if `found` shows that it is the same."""
        is_so = (
            self.layer is layer
            and self.is_as_found()
            and all(getattr(each.value, "is_leaf", False) for each in self.parts.values())
        )
        return copy(self) if is_so else None

    @cached_property
    def parameters(self) -> list[Tensor]:
        """The parameters of the layer."""
        return [*self.layer.parameters()]

    @cached_property
    def kinds(self) -> int:
        """A hash of all that a replay may depend on: the modules and their modes, their hooks, and
        the functions in place of their forwards."""
        held = [*map(vars, self.layer.modules())]
        hooks = [each for found in held for each in map(found.get, HOOKS) if each]
        forwards = [kind_of(each["forward"]) for each in held if "forward" in each]
        return hash(
            (self.modes, *[kind_of(one) for each in hooks for one in each.values()], *forwards)
        )

    def _add_modules(self, name: str, root: nn.Module, owner: str = "") -> None:
        """Adds what a module and those inside it hold.

        FSDP2 exchanges parameters by itself, so they are left out under it, and those of a module
        that only a container or a function holds (owner): nearly always other layers train them.
        """
        exchanged = {"_parameters"} if owner or sharded(root) else set()
        listed = [*root.named_modules(self._modules, name)]
        for path, module in listed:
            found, prefix = vars(module), f"{path}." if path else ""
            self.note(path, found, owner)
            for name, value in found.items():
                if name not in STANDARD:
                    self.add(f"{prefix}{name}", value, owner)
                elif name not in exchanged and type(value) in USUAL:  # not those of a script
                    if not (value or owner):
                        self._empty.append((path, value))
                        continue
                    self.note(path, value, owner)
                    for number, hook in enumerate([*value.values()] if name in HOOKS else ()):
                        self.add(f"{prefix}{name}.{number}", hook, owner)
                else:
                    self._is_odd |= type(value) not in PLAIN
            for name in {"_parameters", "_buffers"}.difference(exchanged):
                for key, value in getattr(module, name).items():
                    self.add(f"{prefix}{key}", value, owner)
        kinds: Any = dict.fromkeys(type(module) for _, module in listed) if self._objects else ()
        for name, value in chain.from_iterable(map(_shared, kinds)):
            self.add(name, value, name)

    def note(self, name: str, value: Any, owner: str = "") -> list[Any]:
        """Adds a container, without what its items hold. Returns its items."""
        self._known.add(id(value))
        self.containers.append(Part(name, owner, value, _items(value)))
        return self.containers[-1].items

    def add(self, name: str, value: Any, owner: str = "") -> None:
        """Adds a value and all that it holds."""
        value = behind(value)
        if isinstance(value, self._constant) or id(value) in self._known:
            return
        self._known.add(id(value))
        if isinstance(value, (Tensor, *ARRAYS)):
            while name in self.parts:
                name += "'"
            self.parts[name] = Part(name, owner, value)
            self.has_graphs |= isinstance(value, Tensor) and not value.is_leaf
        elif is_generator(value):
            self.generators.append((owner, GeneratorState.of(value)))
        elif isinstance(value, (*CONTAINERS, Names, nn.Module)) or not _is_of_library(value):
            if not isinstance(value, CONTAINERS):
                owner = owner or name
                if self._room <= 0:
                    warnings.warn(
                        f"changes behind {MAX_PARTS:,} parts of a layer are not seen", stacklevel=2
                    )
                if self._room <= 0 or (owner and not self._objects):
                    return
            if isinstance(value, nn.Module):
                self._add_modules(name, value, owner)
                return
            self._add_items(name, value, owner)
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict:
                self._add_items(name, attributes, owner or name)

    def _add_items(self, name: str, value: Any, owner: str) -> None:
        # The items are those that are kept: what is made anew and freed here may have the number
        # (`id`) of the next object.
        is_fixed = isinstance(value, (tuple, frozenset))
        items = _items(value) if is_fixed else self.note(name, value, owner)
        for number, (key, each) in enumerate(_pairs(value, items)):
            if type(each) not in PLAIN:
                self._room -= bool(owner)
                self.add(f"{name}.{key if type(key) is str else number}", each, owner)

    def mark(self) -> None:
        """Begins to count writes, without those that torch does not count."""
        self._versions, self._bits = _versions(self.parts), dict[str, Tensor]()

    def hash_values(self, known: Hashes) -> None:
        """Hashes all tensors, so that a write which torch does not count is found as well.

        known: as in `hash_once`.
        """
        self.mark()
        with unobserved():
            for name, part in self.parts.items():
                if isinstance(part.value, Tensor):
                    self._bits[name] = hash_once(part.value, known)

    def written(self, known: Hashes, *, counts: bool = True) -> list[Part]:
        """Returns the tensors and arrays that were written to since. known: as in `hash_once`.

        counts: whether a write counts as well that put back the bits of `hash_values`.
        """
        before, others, versions = self._bits, set(), _versions(self.parts)
        if before:
            with unobserved():
                now = [hash_once(self.parts[name].value, known) for name in before]
                values = read([*before.values(), *now])
            pairs = zip(before, values, values[len(before) :], strict=False)
            others = {name for name, one, other in pairs if one != other}
        return [
            part
            for name, part in self.parts.items()
            if name in others or (counts and versions[name] != self._versions[name])
        ]

    def changed(self) -> Iterator[tuple[str, str]]:
        """Yields the name and the owner of everything else that is another now, except generators
        that modules hold: these may draw."""
        if self.is_as_found():
            return
        for name, owner, value, items in self.containers:
            if not _has(value, items):
                pairs = _pairs(value, items) if isinstance(value, dict) else ()
                keys = [key for key, one in pairs if not _is_same(one, dict.get(value, key, self))]
                yield ".".join(filter(None, [name, *map(str, keys[:1])])), owner
        yield from ((name, "") for name, value in self._empty if value)
        for owner, state in self.generators:
            if owner and state.is_changed():
                yield f"a generator of {owner}", owner

    def settle(self, owners: Collection[str], *, written: bool) -> None:
        """Drops the tensors of objects that are not among `owners`, and graphs of earlier results.
        Writes count from here on.

        Otherwise each forward of a layer that assigns `self.aux = ...` would hold the graph of the
        forward before it.
        written: whether a tensor was written to, which may have given it a graph.
        """
        self.has_graphs |= written
        self.parts = {name: each for name, each in self.parts.items() if each.owner in owners}
        if self.has_graphs:
            self.found = None
            self.containers = [
                each._replace(items=_without_old_graphs(each.items, _items(each.value)))
                for each in self.containers
            ]
        self.mark()

    @contextmanager
    def restored(self, exchange: Callable[[Any], Any] | None = None) -> Iterator[None]:
        """Gives the containers their items inside the block; then their present ones.

        exchange: returns what takes the place of a value. None: each value keeps its place.
        """
        is_same = exchange is None and self.is_as_found()
        pairs = [] if is_same else [*self._restorable(exchange)]
        try:
            for value, items, now in pairs:
                if items is not now:
                    _refill(value, items)
            yield
        finally:
            if not (is_same and self.is_as_found()):
                for value, items, now in pairs or self._restorable():
                    _refill(value, items if is_same else now)

    def _restorable(self, exchange: Callable[[Any], Any] | None = None) -> Iterator[Any]:
        """Yields the containers that are restored, with their items then and now."""
        for _, _, value, items in self.containers:
            then = [mapped(item, exchange) for item in items] if exchange else items
            yield value, then, items if _has(value, items) else _items(value)
        for _, value in self._empty:
            yield value, [], _items(value)


@lru_cache
def _shared(kind: type) -> list[tuple[str, Any]]:
    """Returns what all objects of a class share, with names: its attributes, the globals that its
    methods name, and methods with defaults or variables around them that may change.

    The same of the functions and classes among these, and not of those that these name.
    """
    shared, known = dict[int, tuple[str, Any]](), set[int]()
    values: list[Any] = [kind]
    for _ in range(2):
        named: list[Any] = []
        for value in values:  # it grows
            if id(value) in known:
                continue
            known.add(id(value))
            if isinstance(value, type):
                values += value.__bases__
            if isinstance(value, WRAPPERS) or type(value).__module__ == "functools":
                values += [getattr(value, name, None) for name in WRAPPED]
            is_of_users = not _is_of_library(value, sys.stdlib_module_names)
            if not (isinstance(value, (type, types.FunctionType)) and is_of_users):
                continue
            place, held, key = value.__qualname__, vars(value), id(value)
            found: Any = held
            put: Any = partial(setattr, value)
            if isinstance(value, type):
                values += [each for name, each in held.items() if name != "__init__"]
            else:
                own = [_slot(each, "cell_contents") for each in value.__closure__ or ()]
                defaults = *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
                own += [each for each in defaults if type(each) not in PLAIN]  # none is bound again
                if any(map(_may_change, own)):
                    shared[key] = place, value
                place, held = value.__module__, value.__globals__
                key, put, found = id(held), held.__setitem__, _globals_in(value.__code__)
                named += [*own, *map(held.get, found)]
            names = shared.setdefault(key, (place, Names(held, {}, put)))[1].names
            names |= dict.fromkeys(
                name
                for name in found
                if name in held and not name.startswith("__") and _may_change(held[name])
            )
        values = named
    return [each for each in shared.values() if getattr(each[1], "names", True)]


def _globals_in(code: types.CodeType) -> set[str]:
    """Returns the globals that a function names, also in functions inside it."""
    found = {each.argval for each in dis.get_instructions(code) if "_GLOBAL" in each.opname}
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return found.union(*map(_globals_in, inner))


def _may_change(value: Any) -> bool:
    """Tells whether a variable may be state: no function, class or module, nor a library's."""
    if isinstance(value, (*PLAIN, *CONTAINERS, *ARRAYS, Tensor, nn.Module)) or is_generator(value):
        return True
    is_code = isinstance(value, (*CONSTANT, *WRAPPERS))
    return not is_code and not _is_of_library(value, sys.stdlib_module_names - RECORDS)


def mapped(item: Any, function: Callable[[Any], Any]) -> Any:
    """Returns `function(item)`; for a tuple, that of each of its values."""
    if not isinstance(item, tuple):
        return function(item)
    values, kind = _items(item), type(item)
    parts = [mapped(each, function) for each in values]
    if all(map(is_, values, parts)):
        return item
    # torch.return_types has a constructor of its own
    made = kind(parts) if hasattr(kind, "n_fields") else tuple.__new__(kind, parts)
    if hasattr(item, "__dict__"):
        made.__dict__ = item.__dict__
    return made


def kind_of(function: Any) -> Any:
    """Returns what stays the same when a function is made again, as in each step: its code."""
    function = getattr(function, "func", getattr(function, "__func__", function))  # a partial's
    return getattr(function, "__code__", type(function))


def _versions(parts: dict[str, Part]) -> dict[str, Any]:
    """Returns numbers that change with each write: versions of tensors, hashes of arrays."""
    return {name: _version(part.value) for name, part in parts.items()}


def _version(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return version_of(value)
    shape = getattr(value, "shape", None)
    return hash((shape, bytes(value) if shape is None else value.tobytes()))


def sharded(layer: nn.Module, kind: str = "FSDPModule") -> list[nn.Module]:
    """Returns the modules in the layer whose parameters FSDP exchanges. kind: its class for them,
    by default that of FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [each for each in layer.modules() if fsdp and isinstance(each, getattr(fsdp, kind))]


def _base_of(value: Any) -> Any:
    """Returns the container of Python whose class, or a subclass of it, a value has. The methods of
    this class tell and change the items, whatever those of the subclass do."""
    return next((each for each in CONTAINERS if issubclass(type(value), each)), None)


def _items(value: Any) -> list[Any]:
    """Returns the items of a container: the keys and then the values of a dictionary, which takes
    the least time; names with their values for a function and the slots of an object."""
    base = _base_of(value)
    if isinstance(value, Names):
        return [*value.names, *[value.held.get(name, UNSET) for name in value.names]]
    if base is None:
        names = *FUNCTIONS.get(type(value), ()), *_slotnames(type(value))
        return [(name, _slot(value, name)) for name in names]
    if isinstance(value, dict):
        return [*base.keys(value), *base.values(value)]
    return [*base.__iter__(value)]


def _pairs(value: Any, items: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields the items of a container with their keys or names, or themselves in their place."""
    half = len(items) // 2
    if isinstance(value, (dict, Names)):
        return zip(items[:half], items[half:], strict=True)
    return zip(items, items, strict=True) if _base_of(value) else iter(items)


def _slot(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except (AttributeError, ValueError):  # the latter by an empty cell
        return UNSET


def _is_of_library(value: Any, others: Collection[str] = ()) -> bool:
    """Tells whether a class, the code of a function, or the class of an object, is torch's or ours
    or of the modules `others`, or is one of the configurations of transformers, which are large."""
    home = (value if isinstance(value, type) else type(value)).__module__
    if isinstance(value, types.FunctionType):
        home = value.__globals__.get("__name__", "")
    package = home.partition(".")[0]
    return package in LIBRARIES or package in others or ".configuration_" in home


def _without_old_graphs(items: list[Any], now: list[Any]) -> list[Any]:
    """Returns items in which a tensor with a graph is a Value, unless it is among `now` as well."""
    held = {id(one) for item in now for one in (item if isinstance(item, tuple) else [item])}

    def valued(one: Any) -> Any:
        is_old = type(one) is Tensor and one.grad_fn is not None and id(one) not in held
        return Value(one.detach(), version_of(one)) if is_old else one

    return [mapped(item, valued) for item in items]


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and type(one) in PLAIN and bool(one == other)


def _has(value: Any, items: list[Any]) -> bool:
    """Tells whether a container has these items."""
    now = _items(value)  # compared by identity first, without a loop in Python
    return len(now) == len(items) and (all(map(is_, now, items)) or all(map(_is_same, now, items)))


def _refill(value: Any, items: list[Any]) -> None:
    if _has(value, items):
        return  # somebody may iterate over it
    base = _base_of(value)
    if type(value) is partial:
        function: Any = value
        function.__setstate__((*map(itemgetter(1), items), vars(value)))
    elif base is None:
        found = _pairs(value, items), _pairs(value, _items(value))
        for (name, item), (_, now) in zip(*found, strict=True):
            if item is UNSET and now is not UNSET:
                object.__delattr__(value, name)
            elif not _is_same(item, now):
                put = value.put if type(value) is Names else partial(object.__setattr__, value)
                put(name, item)
    else:
        base.clear(value)
        if isinstance(value, dict):
            for key, item in _pairs(value, items):
                base.__setitem__(value, key, item)
        else:
            (base.update if base is set else base.extend)(value, items)
