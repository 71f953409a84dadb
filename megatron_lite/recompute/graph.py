"""The shape of an autograd graph, which --recompute-verify compares between forward and replay.

A tensor can have the right values and a wrong history: a detached one loses gradients in silence.
The forward of a rebuilt region runs without gradients, so its graph is built for the comparison
alone, and keeps no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from megatron_lite.parallel.torch_internals import tree_leaves

PARAMETER = "a parameter"
# `reshape` is one or the other, by whether a dispatch mode, such as a meter, sees the operators.
SAME = {"ReshapeAliasBackward0": "ViewBackward0"}


def graph_of(outputs: Any, args: Sequence[Any]) -> tuple[str, ...]:
    """Returns the graph of all tensors among `outputs`, from these back to `args`.

    Each text is one operation: its name, and the results that it reads by the number of their
    operation. A parameter has its identity instead. Two runs of one function on the same inputs
    return equal graphs, although their tensors are other objects.
    """
    known: dict[Any, str] = {(None, 0): "nothing"}
    known |= {
        get_gradient_edge(value)[:2]: f"argument {place}"
        for place, value in enumerate(args)
        if isinstance(value, Tensor) and value.requires_grad
    }
    numbers: dict[Any, int] = {}
    found: list[Any] = []

    def text(edge: tuple[Any, int]) -> str:
        node, output = edge
        if edge in known:
            return known[edge]
        if node not in numbers:
            numbers[node] = len(found)
            found.append(node)
        return f"{numbers[node]}.{output}"

    def described(name: str, edges: Iterable[Any]) -> str:
        return f"{name}({', '.join(map(text, edges))})"

    tensors = [value for value in tree_leaves(outputs) if isinstance(value, Tensor)]
    ends = [get_gradient_edge(one)[:2] if one.requires_grad else (None, 0) for one in tensors]
    graph = [described("the results", ends)]
    for node in found:  # `text` adds to the list
        name, leaf = node.name(), getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            name = f"{PARAMETER} {list(leaf.shape)} at {id(leaf)}"
        graph.append(described(SAME.get(name, name), node.next_functions))
    return tuple(graph)


def run_with_graph(
    function: Callable[..., Any], args: Sequence[Any]
) -> tuple[Any, tuple[str, ...]]:
    """Returns the results of `function(*args)`, and their graph.

    If gradients are off, the results have no history, and the tensors that the function saves for
    backward are freed at once.
    """
    if torch.is_grad_enabled():
        outputs = function(*args)
        return outputs, graph_of(outputs, args)
    inputs = [
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for value in args
    ]
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        outputs = function(*inputs)
    graph = graph_of(outputs, inputs)
    if isinstance(outputs, tuple):
        return tuple(map(_without_history, outputs)), graph
    return _without_history(outputs), graph


def difference(before: tuple[str, ...], now: tuple[str, ...]) -> str:
    """Returns what the graph of a replay lacks, or where it first differs from the forward's."""
    lost = [text for text in before if text.startswith(PARAMETER) and text not in now]
    if lost:
        return f"{lost[0].partition(' at ')[0]} has lost its gradient"
    pairs = zip_longest(before, now, fillvalue="nothing")
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    return f"{one} in forward, {other} in the replay"


def _without_history(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
