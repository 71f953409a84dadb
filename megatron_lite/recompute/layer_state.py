"""Restores a layer's state for a replay: all that its modules hold.

A replay runs with the values that the forward found. Afterwards the layer has the values from
before the replay. Examples are BatchNorm statistics, the vectors of a spectral norm, counters,
`self.aux = ...`, a memory of the last segment, lists that the layer appends to, parameters that the
first forward initializes, hooks that it registers. Values are exchanged by assignment, so a replay
never writes to a tensor that other code holds.

Objects of Python that the modules hold (a statistics collector) are restored by their attributes,
if the first forward changed one. Two things are not covered: objects whose state is no attribute,
and tensors that a module changes without owning them. witness.py finds them.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_lite.parallel.tensor_hash import quick_hash, read
from megatron_lite.recompute.contents import MAX_PARTS, Value, contents, has_attributes, same
from megatron_lite.recompute.own_generators import GLOBAL, GeneratorState, drawn_again, is_generator
from megatron_lite.recompute.verify import unobserved
from megatron_lite.recompute.versions import check_unwritten, has_values, version_of

REGISTRIES = ("_parameters", "_buffers", "_modules")
# The attributes of every module: registries, hooks, `training`.
STANDARD = frozenset(vars(nn.Module()))
OTHERS = STANDARD - {"training"}
HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("hooks"))
CONTAINERS = (list, dict, set, deque, tuple, OrderedDict, defaultdict, Counter)
PLAIN = frozenset({int, float, bool, str, type(None)})
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass
class Written:
    """A record of the state and the arguments that the forwards of a layer wrote to.

    The first forward copies buffers, attributes and arguments, and hashes parameters and what
    objects hold, and compares. Later forwards copy only the tensors, arrays and arguments in this
    record.

    state: the names of tensors, arrays and objects of the layer; None before the first forward.
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
        self.is_first = written.state is None
        found = written.state or set()
        owns_parameters = not is_sharded(layer)
        known: dict[int, Any] = {}
        holders: list[tuple[str, Any]] = list(layer.named_modules())
        self._holders: dict[str, _HolderState] = {}
        self._objects: dict[str, tuple[Any, list[Any]]] = {}
        for path, holder in holders:  # the objects inside are added
            state = _HolderState(holder, path, owns_parameters, known)
            self._holders[path] = state
            for name, each in state.objects[: max(0, MAX_PARTS - len(holders))]:
                if self.is_first and state.is_module:
                    self._objects[name] = each, list(contents(each))
                if self.is_first or name in found or not state.is_module:
                    holders.append((name, each))
        self._parts = {part.name: part for each in self._holders.values() for part in each.parts}
        self._trainable = [
            (part.value, part.value.requires_grad)
            for part in self._parts.values()
            if part.kind == "parameter" and part.value.is_leaf
        ]
        self._global = [GeneratorState.of(each) for each in GLOBAL]
        self._is_settled = False
        present = {name: part for name, part in self._parts.items() if part.has_values()}
        with unobserved():
            self._copies = {
                name: part.copied()
                for name, part in present.items()
                if name in found or (self.is_first and part.is_small())
            }
            self._hashes = {
                name: quick_hash(part.value)
                for name, part in present.items()
                if self.is_first and name not in self._copies
            }

    def copied_bytes(self) -> int:
        """Returns the bytes of the copies."""
        return sum(int(each.nbytes) for each in self._copies.values())

    def settle(self) -> bool:
        """Drops the copies of what the forward did not change. Call it after the forward.

        Returns whether a replay can restore everything. The first forward may have written to a
        parameter, of which it has no copy.
        RuntimeError: a later forward changed something that no earlier one changed, so the old
        value was not copied.
        """
        for state in self._holders.values():
            state.settle()
        # The states are large, and few layers draw from the global generators.
        self._global = [each for each in self._global if each.is_changed()]
        changed = self._changed()
        objects = {
            name
            for name, (each, before) in self._objects.items()
            if not same(before, list(contents(each)))
        }
        self._written.state = (self._written.state or set()) | changed | objects
        lost = changed - self._copies.keys()
        for name in lost if not self.is_first else ():
            raise RuntimeError(
                f"{self._name} wrote to its {self._parts[name].kind} {name}, which its first "
                "forward did not: there is no copy of the old value for a replay. The next forward "
                "makes one; to avoid this one error, take the layer out of the policy"
            )
        self._copies = {name: before for name, before in self._copies.items() if name in changed}
        self._hashes, self._objects = {}, {}
        found = tuple(objects) if self.is_first else ("",)
        self._holders = {
            path: state
            for path, state in self._holders.items()
            if state.is_module or path.startswith(found)
        }
        for part in self._parts.values():
            part.version = part.version_now()
        self._is_settled = True
        return not lost

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
            for state in self._holders.values():
                around.callback(_put_back, state.module, dict(vars(state.module)))
            around.enter_context(_trainable_as(self._trainable))
            around.enter_context(
                registered_as(
                    [each for state in self._holders.values() for each in state.hooks_now()]
                )
            )
            again: dict[int, Any] = {}
            for name, before in self._copies.items():
                part = self._parts[name]
                again[id(part.value)] = part.again(before)
            for state in self._holders.values():
                state.put(again, around)
            own = [each for state in self._holders.values() for each in state.generators]
            around.enter_context(drawn_again([*own, *self._global]))
            yield

    def _check_unwritten(self) -> None:
        for name, part in self._parts.items() if self._is_settled else ():
            if part.version_now() == part.version:
                continue
            if part.kind == "parameter" or name not in self._copies:
                raise RuntimeError(
                    f"{self._name}: its {part.kind} {name} was written to after the forward and "
                    "before backward, so that a replay would compute something else. Run backward "
                    "before you write to it, as an optimizer's step does"
                )

    def _changed(self) -> set[str]:
        changed = {name for name, part in self._parts.items() if part.version_now() != part.version}
        # BatchNorm's kernels do not count their writes to the running statistics, nor does
        # `weight.data.copy_`. So the first forward compares the values. Later forwards take what
        # changed once to change every time.
        if not self.is_first:
            return changed | self._copies.keys()
        with unobserved():
            before = {
                name: each if name in self._hashes else quick_hash(each)
                for name, each in (self._copies | self._hashes).items()
                if name not in changed and isinstance(each, Tensor)
            }
            now = [quick_hash(self._parts[name].value) for name in before]
            values = read([*before.values(), *now])
        pairs = zip(before, values, values[len(before) :], strict=False)
        arrays = {
            name
            for name, each in self._copies.items()
            if not isinstance(each, Tensor) and not _same_bytes(each, self._parts[name].value)
        }
        return changed | arrays | {name for name, one, other in pairs if one != other}


@dataclass
class _Part:
    """A tensor or an array of a module in the layer.

    name: its name within the layer.
    kind: "parameter", "buffer", "attribute", or "object" for an attribute of an object.
    version: a tensor's version before the forward. `settle` replaces it by that after the forward.
    """

    name: str
    kind: str
    value: Any
    version: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.version_now()

    def version_now(self) -> int | None:
        return version_of(self.value) if isinstance(self.value, Tensor) else None

    def has_values(self) -> bool:
        return not isinstance(self.value, Tensor) or has_values(self.value)

    def is_small(self) -> bool:
        """Tells whether the first forward copies it, and does not only hash it."""
        return self.kind in ("buffer", "attribute") or not isinstance(self.value, Tensor)

    def copied(self) -> Any:
        return self.value.detach().clone() if isinstance(self.value, Tensor) else self.value.copy()

    def again(self, before: Any) -> Any:
        """Returns a new tensor or array with the value before the forward, for one replay."""
        if not isinstance(before, Tensor):
            return before.copy()
        if isinstance(self.value, nn.Parameter):
            return nn.Parameter(before.clone(), requires_grad=self.value.requires_grad)
        return before.clone().requires_grad_(self.value.requires_grad)


class _HolderState:
    """Holds what one module, or one object of Python, had before the forward; no submodules.

    attributes: `training` and all attributes that are not standard. Containers are copies, down to
        the values that are none; other values are the objects themselves.
    registries: copies of the dictionaries of parameters, buffers and submodules.
    kind: the module's class.
    containers: the names of the attributes that are containers.
    others: the names of the attributes that are left alone.
    graphs: the names of the attributes that are tensors with a grad_fn.
    parts: the tensors and arrays that a forward might write to.
    generators: the generators among the attributes, with their states.
    objects: the objects of Python among the attributes, with their names.
    hooks: the module's dictionaries of hooks, each with its contents.
    """

    def __init__(
        self, module: Any, path: str, owns_parameters: bool, known: dict[int, Any]
    ) -> None:
        """Reads the present state.

        path: the name of the module within the layer. The layer's own `forward`, which a policy
            replaces, is left alone.
        owns_parameters: whether a replay exchanges the registry of parameters.
        known: the containers that are copied already, with their copies, and known objects.
        """
        found, prefix = vars(module), f"{path}." if path else ""
        self.module, self.kind = module, type(module)
        self.is_module = isinstance(module, nn.Module)
        names = [
            n for n in REGISTRIES if self.is_module and (owns_parameters or n != "_parameters")
        ]
        self.attributes: dict[str, Any] = {}
        # A scripted module has registries of its own kind.
        self.registries = {name: found[name].copy() for name in names if type(found[name]) is dict}
        self.others = (
            frozenset() if not self.is_module else OTHERS if path else OTHERS | {"forward"}
        )
        self.containers: list[str] = []
        self.graphs: list[str] = []
        self.parts: list[_Part] = []
        self.generators: list[GeneratorState] = []
        self.objects: list[tuple[str, Any]] = []
        self.hooks = [(found[name], dict(found[name])) for name in HOOKS if self.is_module]
        for kind, named in (("parameter", "_parameters"), ("buffer", "_buffers")):
            if named in names:
                self.parts += [
                    _Part(f"{prefix}{key}", kind, value)
                    for key, value in found[named].items()
                    if value is not None
                ]
        for name, value in found.items():
            if name not in self.others:
                self.attributes[name] = self._read(f"{prefix}{name}", name, value, known)

    def _read(self, path: str, name: str, value: Any, known: dict[int, Any]) -> Any:
        """Returns an attribute as it is kept, and records what a replay must restore in it."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is Tensor and value.grad_fn is not None:
            self.graphs.append(name)
            return value
        if kind not in CONTAINERS:
            self._note(path, value, known)
            return value
        self.containers.append(name)
        return copied(value, known, lambda leaf: self._note(f"{path}.", leaf, known))

    def _note(self, path: str, value: Any, known: dict[int, Any]) -> None:
        if isinstance(value, np.ndarray) or (isinstance(value, Tensor) and value.is_leaf):
            suffix = str(len(self.parts)) if path.endswith(".") else ""
            kind = "attribute" if self.is_module else "object"
            self.parts.append(_Part(f"{path}{suffix}", kind, value))
        elif is_generator(value):
            self.generators.append(GeneratorState.of(value))
        elif id(value) not in known and has_attributes(value):
            known[id(value)] = value
            suffix = str(len(self.objects)) if path.endswith(".") else ""
            self.objects.append((f"{path}{suffix}", value))

    def settle(self) -> None:
        """Keeps the values of the tensors with a graph that the forward replaced.

        Their graphs are not kept. Otherwise each forward of a layer that assigns `self.aux = ...`
        would hold the graph of the forward before it.
        """
        for name in self.graphs:
            value = self.attributes[name]
            if vars(self.module).get(name) is not value:
                self.attributes[name] = Value(value.detach(), version_of(value))

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
            if isinstance(value, Value):
                check_unwritten(*value)
                # an input of the replay that requires grad; gradients are on in a replay
                (target[name],) = ReplayInputs.apply(value.tensor.detach().requires_grad_())
            elif name in self.containers:
                target[name] = copied(value, again)
            else:
                target[name] = again.get(id(value), value)
        for name, registry in self.registries.items():
            target[name] = {key: again.get(id(value), value) for key, value in registry.items()}
        for part in self.parts if self.is_module else ():
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
        return value if all(map(is_, parts, value)) else parts
    # The copy is known before its parts are: a container may hold itself.
    new = again[id(value)] = copy(value)
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        new[key] = copied(part, again, note)
    return new


def _same_bytes(one: Any, other: Any) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


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
    now = [(parameter, parameter.requires_grad) for parameter, _ in flags]
    hooks = [
        (parameter, name, getattr(parameter, name))
        for parameter, _ in flags
        for name in PARAMETER_HOOKS
    ]
    with registered_as((found, found) for *_, found in hooks if found is not None):
        try:
            _set_trainable(flags)
            yield
        finally:
            _set_trainable(now)
            for parameter, name, found in hooks:
                if getattr(parameter, name) is not found:
                    setattr(parameter, name, found)


def _set_trainable(flags: list[tuple[Tensor, bool]]) -> None:
    for parameter, flag in flags:
        if parameter.requires_grad != flag:
            parameter.requires_grad_(flag)


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


def _refill(found: dict[Any, Any], contents: dict[Any, Any]) -> None:
    found.clear()
    found.update(contents)


def is_sharded(layer: nn.Module) -> bool:
    """Tells whether FSDP2 exchanges the parameters of a module in the layer. If so, a replay
    does not."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        isinstance(module, fsdp.FSDPModule) for module in layer.modules()
    )
