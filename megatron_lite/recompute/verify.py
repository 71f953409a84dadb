"""Compares runs of a function bit for bit: hashes of tensors, random-number streams, and the graph.

`Execution` is what is seen of one run. `Record` compares the units and regions of our own GPT, with
`--recompute-verify`. witness.py compares layers of any kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_lite.parallel.rng import Generators
from megatron_lite.parallel.tensor_hash import quick_hash, read
from megatron_lite.parallel.torch_internals import disable_current_modes, without_torch_function
from megatron_lite.recompute.graph import Graph, run_with_graph
from megatron_lite.recompute.randomness import Randomness

STREAM = "RNG stream"


class RecomputeMismatch(RuntimeError):
    """A replay computed something else than its forward, so its gradients would be wrong."""


class Execution:
    """Holds what is seen of one run: of a forward, or of a replay.

    places: the names of what is hashed, with shapes. hashes: one each, on its device.
    graph: the graph of the results.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        self.hashes: list[Tensor] = []
        self.graph = Graph()

    def see(
        self,
        place: str,
        tensor: Tensor,
        hashed: Tensor | None = None,
        known: dict[Any, Tensor] | None = None,
    ) -> None:
        """Hashes a tensor, unless that was done before.

        known: the hashes of tensors that are alive, by their place in memory. They are added to.
        """
        is_choice = not (tensor.is_floating_point() or tensor.is_complex())  # an index, or a mask
        values = f" of {tensor.dtype}" if is_choice else ""
        self.places.append(f"{place} {list(tensor.shape)}{values}")
        if hashed is None and known is not None and _lies_plainly(tensor):
            lies = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            key = (*lies, tensor.is_conj(), tensor.is_neg())
            if key not in known:
                known[key] = quick_hash(tensor)
            hashed = known[key]
        self.hashes.append(quick_hash(tensor) if hashed is None else hashed)

    def see_streams(self, when: str, rng: Generators | None) -> None:
        """Hashes the states of the random-number generators."""
        if rng is None:
            return
        now = Randomness.now(rng)
        for name, state in zip((*now.names.names, "cpu"), now.states, strict=False):
            self.places.append(f"{STREAM} {name} at {when}")
            self.hashes.append(quick_hash(state))

    def differences(self, replay: Execution, name: str, *, whole: bool) -> list[str]:
        """Returns the places where a replay of this run has other bits. Waits for the device once.

        RecomputeMismatch: it has other places, or another graph. whole: as in `Graph.difference`.
        """
        values = read([*self.hashes, *replay.hashes])
        before, now = values[: len(self.hashes)], values[len(self.hashes) :]
        places = [
            place
            for place, other, one, two in zip(self.places, replay.places, before, now, strict=False)
            if place == other and one != two
        ]
        if self.places != replay.places:
            pairs = zip([*self.places, "the end"], [*replay.places, "the end"], strict=False)
            one, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise RecomputeMismatch(
                f"recomputation of {name} took another path: {one} in forward, {other} in the "
                f"replay{f'; before it, {places[0]} differs' if places else ''}"
            )
        lost = self.graph.difference(replay.graph, whole=whole)
        if lost and not (whole and places):
            raise RecomputeMismatch(f"{name}: the graph of a replay is not the forward's: {lost}")
        return places


def described(places: list[str]) -> str:
    """Returns what differs first, and whether the random numbers do."""
    streams = [place for place in places if place.startswith(STREAM)]
    tensors = [place for place in places if not place.startswith(STREAM)]
    what = f"{tensors[0]} differs from the forward's" if tensors else "the tensors agree"
    if not streams:
        return f"{what}; no {STREAM} differs"
    return f"{what}; {streams[0]} stood elsewhere than in forward"


class Record:
    """The forward of a unit or region of our own GPT, with which every replay is compared.

    what: the name of the unit or region in messages.
    rng: the random-number streams to compare; None for a function that draws nothing.
    """

    def __init__(self, what: str, rng: Generators | None) -> None:
        self.what, self.rng = what, rng
        self._forward: Execution | None = None
        self._now = Execution()

    def recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` with comparison: the first call is recorded, later calls are compared.

        It covers the arguments, the values passed to `see` inside the call, the results, and their
        graph.
        RecomputeMismatch: a later call differs from the first one.
        """

        def call(*args: Any) -> Any:
            self._now = run = Execution()
            self.see(f"{self.what}, input", args)
            outputs, run.graph = run_with_graph(function, args)
            self.see(f"{self.what}, output", outputs)
            self._now = Execution()
            if self._forward is None:
                self._forward = run
            elif places := self._forward.differences(run, self.what, whole=True):
                raise RecomputeMismatch(
                    f"a replay is not what its forward was at {described(places)}"
                )
            return outputs

        return call

    def see(self, place: str, values: Any) -> None:
        """Adds the tensors among `values`, a tensor or a tuple, to the run, and the streams."""
        with unobserved():
            for number, each in enumerate(values if isinstance(values, tuple) else (values,)):
                if isinstance(each, Tensor):
                    self._now.see(f"{place}: tensor {number}", each)
            self._now.see_streams(place, self.rng)


@contextmanager
def unobserved() -> Iterator[None]:
    """Hides operations from modes and from autograd: they are no part of the function."""
    with torch.no_grad(), disable_current_modes(), without_torch_function():
        yield


def _lies_plainly(tensor: Tensor) -> bool:
    """Whether the address, the shape and the strides tell which values a tensor has."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_nested
    )
