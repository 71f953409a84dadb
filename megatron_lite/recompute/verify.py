"""Compares runs of a function bit for bit: hashes of tensors, random-number streams, and the graph.

A tensor can have the right values and a wrong history: a detached one loses gradients in silence.

`Execution` is what is seen of one run. `Record` (checkpoint.py) compares the units and regions of
our own GPT, witness.py layers of any kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from megatron_lite.parallel.tensor_hash import quick_hash, read
from megatron_lite.parallel.torch_internals import base_of

from .contents import shape_of
from .randomness import Generators, Randomness

STREAM = "RNG stream"
NOT_THE_SAME = "a replay is not what its forward was at"


# `reshape` is one or the other, by whether a dispatch mode, such as a meter, sees the operators.
SAME = {"ReshapeAliasBackward0": "ViewBackward0"}
# FSDP2 passes a unit's inputs through this node in a forward, and not in a replay in backward.
PASSED = "RegisterPostBackwardFunctionBackward"


def inputs_of(named: Iterable[tuple[str, Any]]) -> dict[Any, str]:
    """Returns the names of the inputs of a graph, by the id of a leaf or by
    node and output. The first name of each counts.

    The base of a view stands for the view as well, if it is no input itself. Call it before the
    function, which may write to its inputs.
    """
    pairs = [*named]
    pairs += [(name, base_of(one)) for name, one in pairs]
    return {
        id(each) if each.is_leaf else (each.grad_fn, each.output_nr): name
        for name, each in reversed(pairs)
        if each is not None and each.requires_grad
    }


class Graph(NamedTuple):
    """The graph between results and inputs.

    operations: one text for each operation: its name, and the results that it reads by the number
        of their operation. Two runs of one function on equal inputs have equal texts.
    ends: the names of the inputs and parameters that the results depend on.
    """

    operations: tuple[str, ...] = ()
    ends: frozenset[str] = frozenset()

    @classmethod
    def of(cls, results: Iterable[Tensor], inputs: dict[Any, str]) -> Graph:
        """Returns the graph of the results, back to the inputs, whose own history is not read."""
        numbers = {}
        found: list[Any] = []
        ends = set()

        def text(node: Any, output: int, leaf: Any = None) -> str:
            while node and node.name() == PASSED:
                node, output = node.next_functions[output]
            leaf = getattr(node, "variable", leaf)
            name = inputs.get((node, output) if leaf is None else id(leaf))
            if name is None and isinstance(leaf, Parameter):
                name = f"a parameter {list(leaf.shape)} at {id(leaf)}"
            elif name is None and leaf is not None:
                name = "a tensor that is no parameter of the layer"
            if name is not None:
                ends.add(name)
                return name
            if not node:
                return "nothing"
            if node not in numbers:
                numbers[node] = len(found)
                found.append(node)
            return f"{numbers[node]}.{output}"

        first = [
            text(one.grad_fn, one.output_nr, one if one.is_leaf and one.requires_grad else None)
            for one in results
        ]
        operations = [f"the results({', '.join(first)})"]
        for node in found:  # `text` adds to the list
            edges = ", ".join(text(*edge) for edge in node.next_functions)
            operations.append(f"{SAME.get(node.name(), node.name())}({edges})")
        return cls(tuple(operations), frozenset(ends))

    def difference(self, now: Graph, *, whole: bool) -> str | None:
        """Returns what the graph of a replay has lost or has besides, or None.

        whole: whether its operations must be the same, too.
        """
        for verb, names in (("lost", self.ends - now.ends), ("has", now.ends - self.ends)):
            if names:
                found = ", ".join(name.partition(" at ")[0] for name in sorted(names))
                return f"it {verb} {found}"
        if not whole or self.operations == now.operations:
            return None
        pairs = zip_longest(self.operations, now.operations, fillvalue="nothing")
        return _first_difference(pairs)


class Execution:
    """Holds what is seen of one run: of a forward, or of a replay.

    places: the names of what is hashed, with shapes. hashes: one each, on its device.
    graph: the graph of the results.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        self.hashes: list[Tensor] = []
        self.graph = Graph()

    def see(self, place: str, tensor: Tensor, hashed: Tensor | None = None) -> None:
        """Takes note of a tensor. hashed: its hash, if there is one already."""
        is_choice = not (tensor.is_floating_point() or tensor.is_complex())  # an index, or a mask
        values = f" of {tensor.dtype}" if is_choice else ""
        self.places.append(f"{place} {list(shape_of(tensor))}{values}")
        self.hashes.append(quick_hash(tensor) if hashed is None else hashed)

    def see_streams(self, when: str, rng: Generators | None) -> None:
        """Hashes the states of the random-number generators."""
        for name, state in Randomness.of(rng).states.items() if rng else ():
            self.places.append(f"{STREAM} {name} at {when}")
            self.hashes.append(quick_hash(state))

    def differences(self, replay: Execution, *, whole: bool) -> tuple[list[str], str | None]:
        """Returns the places where a replay of this run has other bits, and what else is another:
        its places or its graph. Waits for the device once.

        whole: as in `Graph.difference`.
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
            before_it = f"; before it, {places[0]} differs" if places else ""
            return places, f"it took another path: {_first_difference(pairs)}{before_it}"
        if places and sorted(before) == sorted(now):  # a scripted function may, in its second call
            return places, f"it saved the same tensors in another order, from {places[0]} on"
        lost = self.graph.difference(replay.graph, whole=whole)
        return places, lost and f"its graph is not the forward's: {lost}"


def _first_difference(pairs: Iterable[tuple[str, str]]) -> str:
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    return f"{one} in forward, {other} in the replay"


def described(places: list[str]) -> str:
    """Returns what differs first, and whether the random numbers do."""
    streams = [place for place in places if place.startswith(STREAM)]
    tensors = [place for place in places if not place.startswith(STREAM)]
    what = f"{tensors[0]} differs from the forward's" if tensors else "the tensors agree"
    if not streams:
        return f"{what}; no {STREAM} differs"
    return f"{what}; {streams[0]} stood elsewhere than in forward"
