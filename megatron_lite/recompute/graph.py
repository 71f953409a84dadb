"""The shape of an autograd graph, which verified replays compare with their forwards.

A tensor can have the right values and a wrong history: a detached one loses gradients in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_lite.parallel.torch_internals import base_of, tree_map
from megatron_lite.recompute.contents import tensors_of

# `reshape` is one or the other, by whether a dispatch mode, such as a meter, sees the operators.
SAME = {"ReshapeAliasBackward0": "ViewBackward0"}
# FSDP2 passes a unit's inputs through this node in a forward, and not in a replay in backward.
PASSED = "RegisterPostBackwardFunctionBackward"


def inputs_of(named: Iterable[tuple[str, Tensor]]) -> dict[Any, str]:
    """Returns the names of the inputs of a graph, by the id of a leaf or by
    node and output. The first name of each counts.

    The base of a view stands for the view as well. Call it before the function, which may write to
    its inputs.
    """
    inputs: dict[Any, str] = {}
    for name, tensor in named:
        for each in (tensor, base_of(tensor)):
            if each is not None and each.requires_grad:
                key = id(each) if each.is_leaf else (each.grad_fn, each.output_nr)
                inputs.setdefault(key, name)
    return inputs


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
        numbers: dict[Any, int] = {}
        found: list[Any] = []
        ends: set[str] = set()

        def text(node: Any, output: int, leaf: Any = None) -> str:
            while node is not None and node.name() == PASSED:
                node, output = node.next_functions[output]
            leaf = getattr(node, "variable", leaf)
            name = inputs.get((node, output) if leaf is None else id(leaf))
            if name is None and isinstance(leaf, nn.Parameter):
                name = f"a parameter {list(leaf.shape)} at {id(leaf)}"
            elif name is None and leaf is not None:
                name = "a tensor that is no parameter of the layer"
            if name is not None:
                ends.add(name)
                return name
            if node is None:
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
        lost, new = (
            [name.partition(" at ")[0] for name in sorted(names)]
            for names in (self.ends - now.ends, now.ends - self.ends)
        )
        if lost or new:
            changes = (("lost", lost), ("has", new))
            return "it " + " and ".join(
                f"{verb} {', '.join(names)}" for verb, names in changes if names
            )
        if not whole or self.operations == now.operations:
            return None
        pairs = zip_longest(self.operations, now.operations, fillvalue="nothing")
        one, other = next(pair for pair in pairs if pair[0] != pair[1])
        return f"{one} in forward, {other} in the replay"


def run_with_graph(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Graph]:
    """Returns the results of `function(*args)`, and their graph.

    If gradients are off, as in the forward of a rebuilt region, the results have no history. The
    graph is built for this comparison alone, and the tensors that it saves are freed at once.
    """
    if torch.is_grad_enabled():
        inputs = inputs_of(
            (f"argument {n}", each) for n, each in enumerate(args) if isinstance(each, Tensor)
        )
        outputs = function(*args)
        return outputs, Graph.of(tensors_of(outputs), inputs)
    args = [
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for value in args
    ]
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        outputs, graph = run_with_graph(function, args)
    return tree_map(
        lambda each: each.detach() if isinstance(each, Tensor) else each, outputs
    ), graph
