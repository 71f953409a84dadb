"""Compares the replay of a unit or region with its forward: hashes of tensors and RNG streams.

It runs only with `--recompute-verify`, since each comparison waits for the device. witness.py does
the same for layers of any kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron_lite.parallel.collectives import results_may_be_kept
from megatron_lite.parallel.rng import Generators
from megatron_lite.parallel.tensor_hash import tensor_hash
from megatron_lite.parallel.torch_internals import disable_current_modes
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
            # Under ops(..) FSDP2's weights enter the graph of a replay elsewhere.
            if self._complete and graph != self._graph and not results_may_be_kept():
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
