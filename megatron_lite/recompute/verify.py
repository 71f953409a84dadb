"""Compares a replay with its forward, by hashes of tensors and of random-number streams.

`Record` serves the layers of this project: it compares the outputs of their regions. `Witness`
serves any function: it compares the tensors that the function saves for backward. Both run only
with `--recompute-verify` or `apply_policy_(..., verify=True)`, since each comparison waits for the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatron_lite.parallel.rng import Generators
from megatron_lite.parallel.tensor_hash import tensor_hash
from megatron_lite.parallel.torch_internals import (
    disable_current_modes,
    tree_flatten_with_path,
    tree_leaves,
    tree_path_text,
)
from megatron_lite.recompute.graph import difference, run_with_graph


class RecomputeMismatch(RuntimeError):
    """A replay computed something else than its forward, so its gradients would be wrong."""


class Seen(NamedTuple):
    """One entry of a record: the tensors at one place, and the random-number streams then.

    place: the name of the place, for messages.
    tensors: the hash of each tensor.
    shapes: the shape of each tensor.
    streams: the hash of each stream's state, by the name of the stream.
    """

    place: str
    tensors: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    streams: dict[str, int]


class Record:
    """The entries of one forward of a unit or region. Every replay is compared with them in order.

    what: the name of the unit or region in messages.
    rng: the random-number streams to compare; None for a function that draws nothing.
    module: the module that runs inside, whose buffers must not change.
    """

    def __init__(self, what: str, rng: Generators | None, module: nn.Module | None = None) -> None:
        self.what, self.rng, self._module = what, rng, module
        self._seen: list[Seen] = []
        self._graph: tuple[str, ...] = ()
        self._complete = False
        self._position = 0

    def recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` with comparison: the first call is recorded, later calls are compared.

        It covers the arguments, the values passed to `see` inside the call, the results, and their
        graph.
        RecomputeMismatch: a later call differs from the first one, or a call changes a buffer.
        """

        def call(*args: Any) -> Any:
            self.restart()
            self.see(f"{self.what}, input", args)
            buffers = self._buffers()
            outputs, graph = run_with_graph(function, args)
            changed = [name for name, value in self._buffers().items() if value != buffers[name]]
            if changed:
                raise RecomputeMismatch(
                    f"{self.what} changes its buffer {changed[0]}: a replay would change it a "
                    "second time"
                )
            self.see(f"{self.what}, output", outputs)
            if self._complete and graph != self._graph:
                raise RecomputeMismatch(
                    f"{self.what}: the graph of a replay is not the forward's: "
                    f"{difference(self._graph, graph)}"
                )
            self._graph = graph
            self.complete()
            return outputs

        return call

    def restart(self) -> None:
        """Begins the forward, or a replay, at the first entry of the record."""
        self._position = 0

    def complete(self) -> None:
        """Ends the forward. Values passed to `see` from here on belong to a replay."""
        self._complete = True

    def see(self, place: str, values: Any, *, streams: bool = True) -> None:
        """Records the tensors among `values`, or compares them if this is a replay.

        values: a tensor, or a tuple or list that contains tensors.
        streams: whether to include the random-number streams.
        RecomputeMismatch: the replay differs from the forward.
        """
        tensors = [
            value
            for value in (values if isinstance(values, (tuple, list)) else (values,))
            if isinstance(value, Tensor)
        ]
        now = Seen(
            place,
            tuple(map(_hash, tensors)),
            tuple(tuple(tensor.shape) for tensor in tensors),
            self._streams() if streams else {},
        )
        if not self._complete:
            self._seen.append(now)
            return
        if self._position == len(self._seen):
            raise RecomputeMismatch(
                f"recomputation took another path: the forward ended before {place}"
            )
        before = self._seen[self._position]
        self._position += 1
        if now != before:
            raise RecomputeMismatch(_difference(before, now))

    def _buffers(self) -> dict[str, int]:
        return (
            {}
            if self._module is None
            else {name: _hash(buffer) for name, buffer in self._module.named_buffers()}
        )

    def _streams(self) -> dict[str, int]:
        if self.rng is None:
            return {}
        return {name: _hash(state) for name, state in self.rng.snapshot().states.items()}


class Witness:
    """The record of one call of any function. Every replay is compared with it.

    The record covers the arguments, each tensor that is saved for backward, the results, and the
    random-number streams before and after the call. It also covers which arguments and parameters
    the graph of the results reaches, because a lost edge would silently lose a gradient.
    """

    def __init__(self, name: str, rng: Generators | None, layer: nn.Module | None) -> None:
        self._record = Record(name, rng)
        self._layer = layer
        self._name = name
        self._saved = 0
        self._reached: frozenset[str] | None = None
        self._inputs: dict[tuple[Any, int], str] = {}

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begins the forward or a replay, and records or compares its arguments."""
        self._saved = 0
        self._record.restart()
        paths = [
            (tree_path_text(path).partition("]")[2], value)
            for path, value in tree_flatten_with_path((args, kwargs))[0]
        ]
        self._record.see(f"{self._name}, input", [value for _, value in paths])
        # A replay gets new tensors, so inputs are known by their edges in this run's graph.
        self._inputs = {
            (gradient_edge.node, gradient_edge.output_nr): f"argument {path}"
            for path, gradient_edge in (
                (path, get_gradient_edge(value))
                for path, value in paths
                if isinstance(value, Tensor) and value.requires_grad
            )
        }

    def save(self, tensor: Tensor) -> None:
        """Records a tensor that is saved for backward, or compares it if this is a replay."""
        self._record.see(f"{self._name}, saved tensor {self._saved}", tensor, streams=False)
        self._saved += 1

    def end(self, outputs: Any) -> None:
        """Ends the forward or a replay, and records or compares its results and their graph.

        RecomputeMismatch: the replay differs from the forward.
        """
        self._record.see(f"{self._name}, output", tree_leaves(outputs))
        reached = frozenset(self._reaches(outputs))
        if self._reached is None:
            self._reached = reached
            self._record.complete()
        elif reached != self._reached:
            lost, new = sorted(self._reached - reached), sorted(reached - self._reached)
            changes = [f"lost {', '.join(lost)}"] if lost else []
            changes += [f"has {', '.join(new)} besides"] if new else []
            raise RecomputeMismatch(
                f"{self._name}: the graph of a replay is not the forward's: it "
                f"{' and '.join(changes)}"
            )

    def _reaches(self, outputs: Any) -> Iterator[str]:
        parameters = (
            {}
            if self._layer is None
            else {id(parameter): name for name, parameter in self._layer.named_parameters()}
        )
        edges: list[tuple[Any, int]] = [
            (value.grad_fn, value.output_nr)
            for value in tree_leaves(outputs)
            if isinstance(value, Tensor) and value.grad_fn is not None
        ]
        # The search goes back through the graph and stops at the arguments: their own history is
        # that of the caller, and a replay does not have it. A node with a `variable` accumulates
        # the gradient of that leaf.
        seen = set()
        while edges:
            edge = edges.pop()
            node = edge[0]
            if node is None or edge in seen:
                continue
            seen.add(edge)
            if edge in self._inputs:
                yield self._inputs[edge]
                continue
            if hasattr(node, "variable"):
                yield parameters.get(
                    id(node.variable), "a tensor that is no parameter of the layer"
                )
            edges += node.next_functions


def _hash(tensor: Tensor) -> int:
    """Returns a 64-bit hash of the tensor's bits and their places. Waits for the device."""
    # A mode that keeps the results of operators must neither count nor replace these operators.
    with disable_current_modes():
        return int(tensor_hash(tensor).item())


def _difference(before: Seen, now: Seen) -> str:
    if now.place != before.place or now.shapes != before.shapes:
        return (
            f"recomputation took another path: {before.place} with shapes {before.shapes} in "
            f"forward, {now.place} with {now.shapes} in the replay"
        )
    streams = [name for name in before.streams if now.streams[name] != before.streams[name]]
    random = "the RNG streams agree" if before.streams else "no RNG stream was compared"
    if streams:
        random = f"RNG stream {', '.join(streams)} stood elsewhere than in forward"
    changed = [
        number
        for number, (one, other) in enumerate(zip(before.tensors, now.tensors, strict=True))
        if one != other
    ]
    what = (
        f"tensor {changed[0]} {list(now.shapes[changed[0]])} differs"
        if changed
        else "the tensors agree"
    )
    return (
        f"a replay is not what its forward was at {now.place}: {what} from the forward's; {random}"
        if changed
        else (f"a replay is not what its forward was at {now.place}: {what}, but {random}")
    )
