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

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.parallel.tensor_hash import quick_hash, read
from megatron_lite.recompute.contents import Contents, Part, Value
from megatron_lite.recompute.randomness import GLOBAL, GeneratorState, drawn_again
from megatron_lite.recompute.saved import check_unwritten, has_values
from megatron_lite.recompute.verify import unobserved

HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("hooks"))
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
        self._name, self._layer, self._written = name, layer, written
        self.is_first = written.state is None
        found = written.state or set()
        self._contents = Contents.of_layer(layer, lambda name: self.is_first or name in found)
        # A tensor with a graph is a result of an earlier forward.
        self._parts = self._contents.parts = {
            part.name: part
            for part in self._contents.parts.values()
            if not isinstance(part.value, Tensor) or part.value.is_leaf
        }
        self._trainable = [
            (part.value, part.value.requires_grad)
            for part in self._parts.values()
            if isinstance(part.value, nn.Parameter)
        ]
        self._global = [GeneratorState.of(each) for each in GLOBAL]
        self._is_settled = False
        with unobserved():
            self._copies = {
                name: _copied(part.value)
                for name, part in self._parts.items()
                if _has_values(part) and (name in found or (self.is_first and _is_small(part)))
            }
            self._hashes = {
                name: quick_hash(part.value)
                for name, part in self._parts.items()
                if _has_values(part) and self.is_first and name not in self._copies
            }

    def settle(self) -> bool:
        """Drops the copies of what the forward did not change. Call it after the forward.

        Returns whether a replay can restore everything. The first forward may have written to a
        parameter, of which it has no copy.
        RuntimeError: a later forward changed something that no earlier one changed, so the old
        value was not copied.
        """
        # The states are large, and few layers draw from the global generators.
        self._global = [each for each in self._global if each.is_changed()]
        changed = self._changed()
        objects = {owner for _, owner in self._contents.changed()} | {
            self._parts[name].owner for name in changed
        }
        self._written.state = (self._written.state or set()) | changed | objects
        lost = changed - self._copies.keys()
        for name in lost if not self.is_first else ():
            raise RuntimeError(
                f"{self._name} wrote to its {_kind(self._parts[name])} {name}, which its first "
                "forward did not: there is no copy of the old value for a replay. The next forward "
                "makes one; to avoid this one error, take the layer out of the policy"
            )
        self._copies = {name: before for name, before in self._copies.items() if name in changed}
        self._hashes = {}
        self._contents.settle(self._written.state | {""})
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
        again = {
            id(self._parts[name].value): _again(self._parts[name].value, before)
            for name, before in self._copies.items()
        }

        def exchanged(value: Any) -> Any:
            if isinstance(value, Value) and id(value) not in again:
                check_unwritten(*value)
                # an input of the replay that requires grad; gradients are on in a replay
                (again[id(value)],) = ReplayInputs.apply(value.tensor.detach().requires_grad_())
            return again.get(id(value), value)

        with ExitStack() as around:
            around.enter_context(_trainable_as(self._trainable))
            around.enter_context(self._contents.restored(exchanged))
            for module in self._layer.modules():
                if isinstance(module, torch.jit.ScriptModule):  # its registries are of another kind
                    for name, buffer in module._buffers.items():
                        if id(buffer) in again:
                            around.callback(setattr, module, name, buffer)
                            setattr(module, name, again[id(buffer)])
            own = [state for _, state in self._contents.generators]
            around.enter_context(drawn_again([*own, *self._global]))
            yield

    def _check_unwritten(self) -> None:
        for name, part in self._parts.items() if self._is_settled else ():
            if part.version_now() == part.version:
                continue
            if isinstance(part.value, nn.Parameter) or name not in self._copies:
                raise RuntimeError(
                    f"{self._name}: its {_kind(part)} {name} was written to after the forward and "
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
        return changed | {name for name, one, other in pairs if one != other}


def _kind(part: Part) -> str:
    if isinstance(part.value, nn.Parameter):
        return "parameter"
    return "tensor" if isinstance(part.value, Tensor) else "array"


def _is_small(part: Part) -> bool:
    """Tells whether the first forward copies it, and does not only hash it."""
    return not isinstance(part.value, Tensor) or not (part.owner or _kind(part) == "parameter")


def _has_values(part: Part) -> bool:
    return not isinstance(part.value, Tensor) or has_values(part.value)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _again(value: Any, before: Any) -> Any:
    """Returns a new tensor or array with the value before the forward, for one replay."""
    new = _copied(before)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(new, requires_grad=value.requires_grad)
    return new.requires_grad_(value.requires_grad) if isinstance(value, Tensor) else new


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


@contextmanager
def _trainable_as(flags: Sequence[tuple[Tensor, bool]]) -> Iterator[None]:
    """Gives the parameters these values of `requires_grad` inside the block.

    After the block they have their present ones, and their present hooks.
    """
    now = [(parameter, parameter.requires_grad) for parameter, _ in flags]
    hooks = Contents()
    places = [(parameter, name) for parameter, _ in flags for name in PARAMETER_HOOKS]
    found = [getattr(*place) for place in places]
    for each in found:
        if each is not None:
            hooks.note("", each)
    with hooks.restored():
        try:
            _set_trainable(flags)
            yield
        finally:
            _set_trainable(now)
            for place, before in zip(places, found, strict=True):
                if getattr(*place) is not before:
                    setattr(*place, before)


def _set_trainable(flags: Sequence[tuple[Tensor, bool]]) -> None:
    for parameter, flag in flags:
        if parameter.requires_grad != flag:
            parameter.requires_grad_(flag)
