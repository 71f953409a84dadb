"""Restores a layer's state for a replay: all that its modules hold. It also finds written
arguments.

A replay runs with the values that the forward found. Afterwards the layer has the values from
before the replay. Examples are BatchNorm statistics, the vectors of a spectral norm, counters,
`self.aux = ...`, a memory of the last segment, lists that the layer appends to, parameters that the
first forward initializes, hooks that it registers. Values are exchanged by assignment, so a replay
never writes to a tensor that other code holds.

Objects of Python that the modules hold (a statistics collector) are restored by their attributes.
Two things are not covered: objects whose state is no attribute, and tensors that a module changes
without owning them. witness.py finds them.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.parallel.torch_internals import has_values

from .call_arguments import Arguments
from .contents import Contents, Part, Value, unobserved
from .randomness import drawn_again, global_states, globals_at
from .replay import replay_inputs
from .saved import check_unwritten

COUNT, STATISTICS = "num_batches_tracked", ("running_mean", "running_var")
PARAMETER_STATE = ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
state_of = attrgetter(*PARAMETER_STATE)


@dataclass
class Written:
    """A record of the state and the arguments that the forwards of a layer wrote to.

    The first forward copies buffers, attributes and arguments, and hashes parameters and what
    objects hold, and compares. Later forwards copy only what is in this record.

    names: of tensors, arrays, objects and arguments. A layer writes to other buffers in eval mode
        than in training mode (BatchNorm), so each combination of modules and modes has its own.
    known: what the layer held before a forward that changed nothing.
    """

    names: dict[Any, set[str]] = field(default_factory=dict)
    known: Contents | None = None

    def __reduce__(self) -> Any:
        """Leaves out what belongs to the modules: a copy of the model has others."""
        return Written, (self.names,)


class LayerState:
    """The state of `layer` before a forward, and what the forward may write to besides.

    Make it before the forward, call `settle` after the forward, and `restored` around each replay.

    layer: None for a function without a state.
    arguments: of the call. The modules and functions among them are part of the state.
    copies: the values before the forward of what it may write to; after `settle`, of what it wrote
        to in the layer.
    """

    def __init__(
        self, name: str, layer: nn.Module | None, written: Written, arguments: Arguments
    ) -> None:
        self._name, self._layer, self._written = name, layer, written
        others = arguments.holders
        same = None if others or not written.known else written.known.again(layer)
        self.contents = same or (Contents() if layer is None else Contents.of_layer(layer))
        for place, holder in others.items():
            self.contents.found = None
            self.contents.add(place, holder)
        found = written.names.get(self.contents.modes)
        self.is_first = layer is not None and found is None
        # A tensor with a graph is a result of an earlier forward.
        self._parts = self.contents.parts = {
            name: part
            for name, part in self.contents.parts.items()
            if not isinstance(part.value, Tensor) or part.value.is_leaf
        } | {name: Part(name, "", tensor) for name, tensor in arguments.tensors.items()}
        self._arguments = {*arguments.tensors}  # names alone: their graphs must not live on here
        self._trainable = [
            (part.value, part.value.requires_grad)
            for part in self._parts.values()
            if isinstance(part.value, nn.Parameter)
        ]
        self._global = [] if layer is None else global_states()
        self._is_settled = False
        with unobserved():
            self.copies = {
                name: copied(part.value)
                for name, part in self._parts.items()
                if (_is_small(part) if self.is_first else name in (found or ()))
                and has_values(part.value)
            }
        # BatchNorm's kernels do not count their writes to the running statistics, nor does
        # `weight.data.copy_`. So the first forward compares the values.
        self.contents.mark()
        if self.is_first:
            self.contents.hash_values({})

    def settle(self) -> tuple[bool, dict[str, Tensor]]:
        """Drops the copies of what the forward did not change. Call it after the forward.

        Returns whether a replay can restore everything, since the first forward may have written to
        a parameter, of which it has no copy; and the copies of arguments, which it drops, too.
        RuntimeError: a later forward changed something that no earlier one changed, so the old
        value was not copied.
        """
        written = {part.name: part for part in self.contents.written({})}
        changed = [*self.contents.changed()]
        # A batch of zeros leaves BatchNorm's mean as it was. It counts its batches all the same.
        names = {name.replace(COUNT, each) for name in written for each in STATISTICS}
        written |= {name: self._parts[name] for name in names & self.copies.keys()}
        owners = {part.owner for part in written.values()} | {owner for _, owner in changed}
        found = self._written.names.setdefault(self.contents.modes, set())
        found |= written.keys() | owners
        lost = written.keys() - self.copies.keys()
        for name in lost if not self.is_first else ():
            raise RuntimeError(
                f"{self._name} wrote to its {self._told(name)}, which its first forward did not: "
                "there is no copy of the old value for a replay. The next forward makes one; to "
                "avoid this one error, take the layer out of the policy"
            )
        if self.is_first:  # later forwards take what changed once to change every time
            self.copies = {name: self.copies[name] for name in written.keys() - lost}
        for name in self._arguments:
            del self._parts[name]
        self.contents.settle(found | {""}, written=bool(written))
        self._parts = self.contents.parts
        self._is_settled = True
        is_known = self.contents.found and not (self.is_first or written or changed)
        self._written.known = self.contents if is_known else None
        return not lost, {
            name: self.copies.pop(name) for name in self._arguments if name in self.copies
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Gives the layer the state from before the forward inside the block.

        After the block the layer has the state from before the block.
        RuntimeError: a parameter was written to since the forward, or a tensor of the layer was
        that the forward did not change.
        """
        for name, _, value, _ in self.contents.written({}) if self._is_settled else ():
            if isinstance(value, nn.Parameter) or name not in self.copies:
                raise RuntimeError(
                    f"{self._name}: its {self._told(name)} was written to after the forward and "
                    "before backward, so that a replay would compute something else. Run backward "
                    "before you write to it, as an optimizer's step does"
                )
        again = {
            id(self._parts[name].value): _again(self._parts[name].value, before)
            for name, before in self.copies.items()
        }

        def exchanged(value: Any) -> Any:
            if isinstance(value, Value) and id(value) not in again:
                check_unwritten(value.tensor, value.version)
                # an input of the replay that requires grad; gradients are on in a replay
                again.update(replay_inputs({id(value): value.tensor.detach()})[0])
            return again.get(id(value), value)

        exchange = exchanged if again or self.contents.has_graphs else None
        own = [state for _, state in self.contents.generators]
        with (
            _trainable_as(self._trainable),
            self.contents.restored(exchange),
            drawn_again(own),
            globals_at(self._global),
            ExitStack() as around,
        ):
            for module in self._layer.modules() if again and self._layer is not None else ():
                if isinstance(module, torch.jit.ScriptModule):  # its registries are of another kind
                    for name, buffer in module._buffers.items():
                        if id(buffer) in again:
                            around.callback(setattr, module, name, buffer)
                            setattr(module, name, again[id(buffer)])
            yield

    def _told(self, name: str) -> str:
        if name in self._arguments:
            return name
        value = self._parts[name].value
        if isinstance(value, nn.Parameter):
            return f"parameter {name}"
        return f"{'tensor' if isinstance(value, Tensor) else 'array'} {name}"


def _is_small(part: Part) -> bool:
    """Tells whether the first forward copies it, and does not only hash it."""
    return not isinstance(part.value, Tensor) or not (
        part.owner or isinstance(part.value, nn.Parameter)
    )


def copied(value: Any) -> Any:
    """Returns a copy of a tensor, without its graph, or of an array."""
    return value.detach().clone() if isinstance(value, Tensor) else copy(value)


def _again(value: Any, before: Any) -> Any:
    """Returns a new tensor or array with the value before the forward, for one replay."""
    new = copied(before)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(new, requires_grad=value.requires_grad)
    return new.requires_grad_(value.requires_grad) if isinstance(value, Tensor) else new


@contextmanager
def _trainable_as(flags: Sequence[tuple[Tensor, bool]]) -> Iterator[None]:
    """Gives the parameters these values of `requires_grad` inside the block.

    After the block they have their present ones, and their present hooks.
    """
    found = [(parameter, *state_of(parameter)) for parameter, _ in flags]
    hooks = Contents()
    for each in [each for _, _, *held in found for each in held if each is not None]:
        hooks.note("", each)
    with hooks.restored():
        try:
            for parameter, flag in flags:
                if parameter.requires_grad != flag:
                    parameter.requires_grad_(flag)
            yield
        finally:
            for parameter, *before in found:
                for name, value, now in zip(
                    PARAMETER_STATE, before, state_of(parameter), strict=True
                ):
                    if now is not value:
                        setattr(parameter, name, value)
