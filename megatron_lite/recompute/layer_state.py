"""Restores a layer's state for a replay: attributes, buffers and generators of all its modules.

A replay runs with the values that the forward found. Afterwards the layer has the values from
before the replay. Examples are BatchNorm statistics, the vectors of a spectral norm, counters,
`self.aux = ...`, and lists that the layer appends to. Values are exchanged by assignment, so a
replay never writes to a tensor that other code holds.

Two things are not covered: objects that a module holds as plain attributes (a statistics collector)
and changes in place, and tensors that a module changes without owning them.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.recompute.versions import has_values, version_of

REGISTRIES = ("_parameters", "_buffers", "_modules")
# The attributes of every module: registries, hooks, `training`. Also the forward, which a policy
# replaces.
STANDARD = frozenset(vars(nn.Module())) | {"forward"}
CONTAINERS = frozenset({list, dict, set, deque})
PLAIN = frozenset({int, float, bool, str, type(None)})


@dataclass
class Written:
    """A record of the buffers and arguments that the forwards of a layer wrote to.

    The first forward copies everything that a layer could write to, and compares. Later forwards
    copy only the buffers and arguments in this record.

    buffers: their names; None before the first forward.
    arguments: their places among the flattened arguments; None before the first forward.
    """

    buffers: set[str] | None = None
    arguments: set[int] | None = None


class LayerState:
    """The state of `layer` before a forward.

    Make it before the forward, call `settle` after the forward, and `restored` around each replay.
    """

    def __init__(self, name: str, layer: nn.Module, written: Written) -> None:
        self._name, self._written = name, written
        named = list(layer.named_modules())
        self._modules = [_ModuleState.of(module) for _, module in named]
        self._owns_parameters = not _is_sharded(layer)
        self._parameters = [
            _StateTensor(path, module, key, value)
            for path, module in (named if self._owns_parameters else ())
            for key, value in module._parameters.items()
            if value is not None
        ]
        self._buffers = [
            _StateTensor(path, module, key, value, version_of(value))
            for path, module in named
            for key, value in module._buffers.items()
            if value is not None
        ]
        self._first, self._is_settled = written.buffers is None, False
        self._copies = {
            buffer.name: buffer.tensor.detach().clone()
            for buffer in self._buffers
            if (self._first or buffer.name in (written.buffers or ())) and has_values(buffer.tensor)
        }

    def settle(self) -> None:
        """Drops the copies of buffers that the forward did not change. Call it after the forward.

        RuntimeError: the forward changed a buffer that no earlier forward changed, so the old value
        was not copied.
        """
        for state in self._modules:
            state.settle()
        changed = {buffer.name for buffer in self._buffers if self._has_changed(buffer)}
        if self._written.buffers is None:
            self._written.buffers = set()
        self._written.buffers |= changed
        for name in changed - self._copies.keys():
            raise RuntimeError(
                f"{self._name} wrote to its buffer {name}, which its first forward did not: there "
                "is no copy of the old value for a replay. The next forward makes one; to avoid "
                "this one error, take the layer out of the policy"
            )
        self._copies = {name: before for name, before in self._copies.items() if name in changed}
        self._buffers = [
            buffer._replace(version=version_of(buffer.tensor)) for buffer in self._buffers
        ]
        self._parameters = [
            part._replace(version=version_of(part.tensor)) for part in self._parameters
        ]
        self._is_settled = True

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Gives the layer the state from before the forward inside the block.

        After the block the layer has the state from before the block.
        RuntimeError: a parameter was written to since the forward, or a buffer was that the forward
        did not change.
        """
        for part in self._parameters if self._is_settled else ():
            if version_of(part.tensor) != part.version:
                raise RuntimeError(
                    f"{self._name}: its parameter {part.name} has been modified by an inplace "
                    "operation after the forward and before backward, so that a replay would "
                    "compute something else. Run backward before the optimizer's step"
                )
        for buffer in self._buffers:
            if buffer.name not in self._copies and version_of(buffer.tensor) != buffer.version:
                raise RuntimeError(
                    f"{self._name}: its buffer {buffer.name} was written to after the forward and "
                    "before backward, so that a replay would compute something else. Write to it "
                    "after backward"
                )
        # The replay works on new dictionaries, lists and buffers. Putting the module's own
        # attributes back undoes all that it did, also if it raised.
        now = [(state.module, dict(vars(state.module))) for state in self._modules]
        try:
            for module in self._modules:
                module.put(parameters=self._owns_parameters)
            for buffer in self._buffers:
                if buffer.name in self._copies:
                    buffer.module._buffers[buffer.key] = self._copies[buffer.name].clone()
            with drawn_again([state for module in self._modules for state in module.generators]):
                yield
        finally:
            for owner, attributes in now:
                vars(owner).clear()
                vars(owner).update(attributes)

    def _has_changed(self, buffer: _StateTensor) -> bool:
        if version_of(buffer.tensor) != buffer.version:
            return True
        before = self._copies.get(buffer.name)
        if before is None:
            return False
        # BatchNorm's kernels do not count their writes to the running statistics, so the first
        # forward compares the values. Later forwards take a buffer that changed once to change
        # every time.
        return not self._first or not torch.equal(before, buffer.tensor)


class GeneratorState(NamedTuple):
    """A generator of a layer, besides torch's default ones, and one of its states."""

    generator: torch.Generator
    state: Tensor

    @classmethod
    def of(cls, generator: torch.Generator) -> GeneratorState:
        """Returns the generator with its present state."""
        return cls(generator, generator.get_state())


@contextmanager
def drawn_again(states: list[GeneratorState]) -> Iterator[None]:
    """Makes the generators repeat inside the block the draws that followed these states.

    After the block they continue as if nothing had been drawn in it.
    """
    before = [GeneratorState.of(each.generator) for each in states]
    try:
        for each in states:
            each.generator.set_state(each.state)
        yield
    finally:
        for each in before:
            each.generator.set_state(each.state)


@dataclass
class _ModuleState:
    """The attributes of one module before the forward, without those of its submodules.

    attributes: `training` and all attributes that are not standard. Lists, dicts, sets and deques
        are shallow copies; other values are the objects themselves.
    registries: copies of the dictionaries of parameters, buffers and submodules.
    containers: the names of the attributes that are such copies.
    graphs: the names of the attributes that are tensors with a grad_fn.
    generators: the generators among the attributes, with their states.
    """

    module: nn.Module
    attributes: dict[str, Any]
    registries: dict[str, dict[str, Any]]
    containers: list[str] = field(default_factory=list)
    graphs: list[str] = field(default_factory=list)
    generators: list[GeneratorState] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module) -> _ModuleState:
        found = vars(module)
        attributes = {"training": found["training"]}
        state = cls(module, attributes, {name: found[name].copy() for name in REGISTRIES})
        for name, value in found.items():
            if name in STANDARD:
                continue
            attributes[name] = value
            kind = type(value)
            if kind in PLAIN:
                continue
            if kind in CONTAINERS:
                attributes[name] = copy.copy(value)
                state.containers.append(name)
            elif kind is torch.Generator:
                state.generators.append(GeneratorState.of(value))
            elif kind is Tensor and value.grad_fn is not None:
                state.graphs.append(name)
        return state

    def settle(self) -> None:
        """Makes the reference weak to each tensor with a graph that the forward replaced.

        Otherwise each forward of a layer that assigns `self.aux = ...` would hold the graph of the
        forward before it.
        """
        for name in self.graphs:
            value = self.attributes[name]
            if vars(self.module).get(name) is not value:
                self.attributes[name] = _Replaced(weakref.ref(value))

    def put(self, *, parameters: bool) -> None:
        """Restores the attributes from before the forward, with new containers and registries.

        parameters: whether to replace the registry of parameters, too.
        """
        target = vars(self.module)
        for name in [
            name for name in target if name not in STANDARD and name not in self.attributes
        ]:
            del target[name]
        target.update(self.attributes)
        target.update({name: copy.copy(self.attributes[name]) for name in self.containers})
        # A tensor that only the replaced attribute held is gone. The replay then runs without it.
        for name in self.graphs:
            value = target[name]
            if isinstance(value, _Replaced):
                target[name] = value.tensor()
                if target[name] is None:
                    del target[name]
        for name, registry in self.registries.items():
            if parameters or name != "_parameters":
                target[name] = registry.copy()


class _Replaced(NamedTuple):
    """An attribute that the forward replaced; None if no other code holds the tensor any more."""

    tensor: weakref.ref[Tensor]


class _StateTensor(NamedTuple):
    """A parameter or a buffer of a module in the layer.

    path: the name of the module within the layer.
    key: the name of the tensor within the module.
    version: its version before the forward. `settle` replaces it by the version after the forward.
    """

    path: str
    module: nn.Module
    key: str
    tensor: Tensor
    version: int | None = None

    @property
    def name(self) -> str:
        """The name of the tensor within the layer."""
        return f"{self.path}.{self.key}" if self.path else self.key


def _is_sharded(layer: nn.Module) -> bool:
    """Tells whether FSDP2 exchanges the parameters of a module in the layer. If so, a replay
    does not."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        isinstance(module, fsdp.FSDPModule) for module in layer.modules()
    )
