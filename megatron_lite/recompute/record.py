"""Compares the units and regions of our own GPT with their forwards, with `--recompute-verify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_lite.parallel.generators import Generators
from megatron_lite.parallel.torch_internals import tree_map
from megatron_lite.recompute.contents import tensors_of, unobserved
from megatron_lite.recompute.replay import RecomputeMismatch
from megatron_lite.recompute.verify import NOT_THE_SAME, Execution, Graph, described, inputs_of


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
            if not self._forward:
                self._forward = run
                return outputs
            places, other = self._forward.differences(run, whole=True)
            if places:
                raise RecomputeMismatch(f"{NOT_THE_SAME} {described(places)}")
            if other:
                raise RecomputeMismatch(f"{NOT_THE_SAME} {self.what}, {other}")
            return outputs

        return call

    def see(self, place: str, values: Any) -> None:
        """Adds the tensors among `values`, a tensor or a tuple, to the run, and the streams."""
        with unobserved():
            for number, each in enumerate(values if isinstance(values, tuple) else (values,)):
                if isinstance(each, Tensor):
                    self._now.see(f"{place}: tensor {number}", each)
            self._now.see_streams(place, self.rng)


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
