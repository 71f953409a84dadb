"""Restores a layer's state for a replay: all that its modules hold.

A replay runs with the values that the forward found. Afterwards the layer has the values from
before the replay. Examples are BatchNorm statistics, the vectors of a spectral norm, counters,
`self.aux = ...`, a memory of the last segment, lists that the layer appends to, parameters that the
first forward initializes, hooks that it registers. Values are exchanged by assignment, so a replay
never writes to a tensor that other code holds.

Two things are not covered: objects that a module holds as plain attributes (a statistics collector)
and changes in place, and tensors that a module changes without owning them. witness.py finds them.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron_lite.parallel.tensor_hash import differing
from megatron_lite.recompute.own_generators import GeneratorState, drawn_again, is_generator
from megatron_lite.recompute.versions import check_unwritten, has_values, version_of

REGISTRIES = ("_parameters", "_buffers", "_modules")
# The attributes of every module: registries, hooks, `training`.
STANDARD = frozenset(vars(nn.Module()))
HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("hooks"))
CONTAINERS = (list, dict, set, deque, tuple, OrderedDict, defaultdict, Counter)
PLAIN = frozenset({int, float, bool, str, type(None)})
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass
class Written:
    """A record of the state and the arguments that the forwards of a layer wrote to.

    The first forward copies everything that a layer could write to, and compares. Later forwards
    copy only the tensors, arrays and arguments in this record.

    state: the names of tensors and arrays of the layer; None before the first forward.
    arguments: their places among the flattened arguments; None before the first forward.
    """

    state: set[str] | None = None
    arguments: set[int] | None = None


class LayerState:
    """The state of `layer` before a forward.

    Make it before the forward, call `settle` after the forward, and `restored` around each replay.
    """

    def __init__(self, name: str, layer: nn.Module, written: Written) -> None:
        self._name, self._written = name, written
        owns_parameters = not is_sharded(layer)
        known: dict[int, Any] = {}
        self._modules = [
            _ModuleState.of(module, path, owns_parameters, known)
            for path, module in layer.named_modules()
        ]
        self._parts = {part.name: part for module in self._modules for part in module.parts}
        self._trainable = [
            (part.value, part.value.requires_grad)
            for part in self._parts.values()
            if part.kind == "parameter" and part.value.is_leaf
        ]
        self._first, self._is_settled = written.state is None, False
        self._copies = {
            name: part.copied()
            for name, part in self._parts.items()
            if (self._first or name in (written.state or ())) and part.has_values()
        }

    def settle(self) -> None:
        """Drops the copies of what the forward did not change. Call it after the forward.

        RuntimeError: the forward changed something that no earlier forward changed, so the old
        value was not copied.
        """
        for state in self._modules:
            state.settle()
        changed = self._changed()
        if self._written.state is None:
            self._written.state = set()
        self._written.state |= changed
        for name in changed - self._copies.keys():
            raise RuntimeError(
                f"{self._name} wrote to its {self._parts[name].kind} {name}, which its first "
                "forward did not: there is no copy of the old value for a replay. The next forward "
                "makes one; to avoid this one error, take the layer out of the policy"
            )
        self._copies = {name: before for name, before in self._copies.items() if name in changed}
        for part in self._parts.values():
            part.version = version_of(part.value) if isinstance(part.value, Tensor) else None
        self._is_settled = True

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Gives the layer the state from before the forward inside the block.

        After the block the layer has the state from before the block.
        RuntimeError: a parameter was written to since the forward, or a tensor of the layer was
        that the forward did not change.
        """
        self._check_unwritten()
        # The replay works on new dictionaries, lists and tensors. Putting the module's own
        # attributes back undoes all that it did, also if it raised.
        with ExitStack() as around:
            for state in self._modules:
                around.callback(_put_back, state.module, dict(vars(state.module)))
            around.enter_context(_trainable_as(self._trainable))
            around.enter_context(
                registered_as([hooks for state in self._modules for hooks in state.hooks_now()])
            )
            again: dict[int, Any] = {}
            for name, before in self._copies.items():
                part = self._parts[name]
                again[id(part.value)] = part.again(before)
            for state in self._modules:
                state.put(again, around)
            generators = [each for state in self._modules for each in state.generators]
            around.enter_context(drawn_again(generators))
            yield

    def _check_unwritten(self) -> None:
        for name, part in self._parts.items() if self._is_settled else ():
            if not isinstance(part.value, Tensor) or version_of(part.value) == part.version:
                continue
            if part.kind == "parameter":
                raise RuntimeError(
                    f"{self._name}: its parameter {name} has been modified by an inplace "
                    "operation after the forward and before backward, so that a replay would "
                    "compute something else. Run backward before the optimizer's step"
                )
            if name not in self._copies:
                raise RuntimeError(
                    f"{self._name}: its {part.kind} {name} was written to after the forward and "
                    "before backward, so that a replay would compute something else. Write to it "
                    "after backward"
                )

    def _changed(self) -> set[str]:
        changed = {
            name
            for name, part in self._parts.items()
            if isinstance(part.value, Tensor) and version_of(part.value) != part.version
        }
        # BatchNorm's kernels do not count their writes to the running statistics, nor does
        # `weight.data.copy_`. So the first forward compares the values. Later forwards take what
        # changed once to change every time.
        rest = [name for name in self._copies if name not in changed]
        if not self._first:
            return changed | set(rest)
        pairs = {name: (self._copies[name], self._parts[name].value) for name in rest}
        arrays = {name for name, (before, _) in pairs.items() if not isinstance(before, Tensor)}
        changed |= {name for name in arrays if not _same_bytes(*pairs.pop(name))}
        return changed | set(compress(pairs, differing(list(pairs.values()))))


@dataclass
class _Part:
    """A tensor or an array of a module in the layer.

    name: its name within the layer.
    kind: "parameter", "buffer" or "attribute".
    version: a tensor's version before the forward. `settle` replaces it by that after the forward.
    """

    name: str
    kind: str
    value: Any
    version: int | None

    @classmethod
    def of(cls, name: str, kind: str, value: Any) -> _Part:
        return cls(name, kind, value, version_of(value) if isinstance(value, Tensor) else None)

    def has_values(self) -> bool:
        return not isinstance(self.value, Tensor) or has_values(self.value)

    def copied(self) -> Any:
        return self.value.detach().clone() if isinstance(self.value, Tensor) else self.value.copy()

    def again(self, before: Any) -> Any:
        """Returns a new tensor or array with the value before the forward, for one replay."""
        if not isinstance(before, Tensor):
            return before.copy()
        if isinstance(self.value, nn.Parameter):
            return nn.Parameter(before.clone(), requires_grad=self.value.requires_grad)
        return before.clone().requires_grad_(self.value.requires_grad)


@dataclass
class _ModuleState:
    """What one module held before the forward, without its submodules.

    attributes: `training` and all attributes that are not standard. Containers are copies, down to
        the values that are none; other values are the objects themselves.
    registries: copies of the dictionaries of parameters, buffers and submodules.
    kind: the module's class.
    others: the names of the attributes that are left alone.
    graphs: the names of the attributes that are tensors with a grad_fn.
    parts: the tensors and arrays that a forward might write to.
    generators: the generators among the attributes, with their states.
    hooks: the module's dictionaries of hooks, each with its contents.
    """

    module: nn.Module
    attributes: dict[str, Any]
    registries: dict[str, dict[str, Any]]
    kind: type
    others: frozenset[str]
    containers: list[str] = field(default_factory=list)
    graphs: list[str] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)
    generators: list[GeneratorState] = field(default_factory=list)
    hooks: list[tuple[dict[Any, Any], dict[Any, Any]]] = field(default_factory=list)

    @classmethod
    def of(
        cls, module: nn.Module, path: str, owns_parameters: bool, known: dict[int, Any]
    ) -> _ModuleState:
        """Returns the present state.

        path: the name of the module within the layer. The layer's own `forward`, which a policy
            replaces, is left alone.
        owns_parameters: whether a replay exchanges the registry of parameters.
        known: the containers that are copied already, with their copies.
        """
        found, prefix = vars(module), f"{path}." if path else ""
        # A scripted module has registries of its own kind, and no attribute `training`.
        names = [name for name in REGISTRIES if owns_parameters or name != "_parameters"]
        registries = {name: found[name].copy() for name in names if type(found[name]) is dict}
        state = cls(
            module, {}, registries, type(module), STANDARD if path else STANDARD | {"forward"}
        )
        state.hooks = [(found[name], dict(found[name])) for name in HOOKS]
        for kind, named in (("parameter", "_parameters"), ("buffer", "_buffers")):
            if named in names:
                state.parts += [
                    _Part.of(f"{prefix}{key}", kind, value)
                    for key, value in found[named].items()
                    if value is not None
                ]
        if "training" in found:
            state.attributes["training"] = found["training"]
        for name, value in found.items():
            if name not in state.others:
                state.attributes[name] = state._read(f"{prefix}{name}", name, value, known)
        return state

    def _read(self, path: str, name: str, value: Any, known: dict[int, Any]) -> Any:
        """Returns an attribute as it is kept, and records what a replay must restore in it."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is Tensor and value.grad_fn is not None:
            self.graphs.append(name)
            return value
        if kind not in CONTAINERS:
            self._note(path, value)
            return value
        self.containers.append(name)
        return copied(value, known, lambda leaf: self._note(f"{path}.", leaf))

    def _note(self, path: str, value: Any) -> None:
        if isinstance(value, np.ndarray) or (isinstance(value, Tensor) and value.is_leaf):
            suffix = str(len(self.parts)) if path.endswith(".") else ""
            self.parts.append(_Part.of(f"{path}{suffix}", "attribute", value))
        elif is_generator(value):
            self.generators.append(GeneratorState.of(value))

    def settle(self) -> None:
        """Keeps the values of the tensors with a graph that the forward replaced.

        Their graphs are not kept. Otherwise each forward of a layer that assigns `self.aux = ...`
        would hold the graph of the forward before it.
        """
        for name in self.graphs:
            value = self.attributes[name]
            if vars(self.module).get(name) is not value:
                self.attributes[name] = _Detached(value.detach(), version_of(value))

    def hooks_now(self) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Returns the dictionaries of hooks with their contents before the forward.

        A lazy module has become another one in its first forward, and its hooks went with it.
        """
        return self.hooks if type(self.module) is self.kind else []

    def put(self, again: dict[int, Any], around: ExitStack) -> None:
        """Restores what the module held, with new containers and registries.

        again: what takes the place of a tensor or an array, by the id of that.
        around: is left after the replay.
        """
        target = vars(self.module)
        for name in [
            name for name in target if name not in self.others and name not in self.attributes
        ]:
            del target[name]
        for name, value in self.attributes.items():
            if isinstance(value, _Detached):
                check_unwritten(*value)
                target[name] = _with_grad(value.tensor.detach())
            elif name in self.containers:
                target[name] = copied(value, again)
            else:
                target[name] = again.get(id(value), value)
        for name, registry in self.registries.items():
            target[name] = {key: again.get(id(value), value) for key, value in registry.items()}
        for part in self.parts:
            if "_buffers" not in self.registries and id(part.value) in again:
                key = part.name.rpartition(".")[2]
                around.callback(setattr, self.module, key, part.value)
                setattr(self.module, key, again[id(part.value)])


class ReplayInputs(torch.autograd.Function):
    """Makes the inputs of a replay results of an operation.

    A layer may write to such tensors in place, which autograd refuses for leaves that require grad.
    """

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf.detach() for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


class _Detached(NamedTuple):
    """A tensor that the forward replaced, without its graph, and its version."""

    tensor: Tensor
    version: int | None


def _with_grad(value: Tensor) -> Tensor:
    """Returns the tensor as an input of a replay that requires grad."""
    with torch.enable_grad():
        again: tuple[Tensor] = ReplayInputs.apply(value.requires_grad_())
    return again[0]


def copied(
    value: Any, again: dict[int, Any], note: Callable[[Any], None] = lambda leaf: None
) -> Any:
    """Returns a copy of nested containers, in which `again` replaces values by their id.

    note: called with each value that is no container.
    """
    if id(value) in again:
        return again[id(value)]
    kind = type(value)
    if kind not in CONTAINERS:
        note(value)
        return value
    if kind in (set, Counter):
        return copy(value)
    if kind is tuple:
        parts = tuple(copied(part, again, note) for part in value)
        return value if all(map(_is, parts, value)) else parts
    # The copy is known before its parts are: a container may hold itself.
    new = again[id(value)] = copy(value)
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        new[key] = copied(part, again, note)
    return new


def _same_bytes(one: Any, other: Any) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _is(one: Any, other: Any) -> bool:
    return one is other


def _put_back(module: nn.Module, attributes: dict[str, Any]) -> None:
    target = vars(module)
    for name in [name for name in target if name not in attributes]:
        del target[name]
    target.update(attributes)


@contextmanager
def _trainable_as(flags: list[tuple[Tensor, bool]]) -> Iterator[None]:
    """Gives the parameters these values of `requires_grad` inside the block.

    After the block they have their present ones, and their present hooks.
    """
    others = [(parameter, not flag) for parameter, flag in flags if parameter.requires_grad != flag]
    hooks = [
        (parameter, name, found, None if found is None else dict(found))
        for parameter, _ in flags
        for name in PARAMETER_HOOKS
        for found in (getattr(parameter, name),)
    ]
    try:
        for parameter, flag in others:
            parameter.requires_grad_(not flag)
        yield
    finally:
        for parameter, flag in others:
            parameter.requires_grad_(flag)
        for parameter, name, found, before in hooks:
            if found is None and getattr(parameter, name) is not None:
                setattr(parameter, name, None)
            elif found is not None and found != before:
                _refill(found, before)


@contextmanager
def registered_as(hooks: Iterable[tuple[dict[Any, Any], dict[Any, Any]]]) -> Iterator[None]:
    """Gives dictionaries of hooks these contents inside the block; then their present ones.

    The dictionaries stay the same objects, because the handles that remove a hook refer to them.
    """
    changes = [(found, before, dict(found)) for found, before in hooks]
    try:
        for found, before, now in changes:
            if now != before:
                _refill(found, before)
        yield
    finally:
        for found, _, now in changes:
            if found != now:
                _refill(found, now)


def _refill(found: dict[Any, Any], contents: dict[Any, Any] | None) -> None:
    found.clear()
    found.update(contents or {})


def is_sharded(layer: nn.Module) -> bool:
    """Tells whether FSDP2 exchanges the parameters of a module in the layer. If so, a replay
    does not."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        isinstance(module, fsdp.FSDPModule) for module in layer.modules()
    )
