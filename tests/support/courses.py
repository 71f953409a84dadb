"""Measures how the live bytes of a real model change during each operation's forward and backward.

    courses = measure(model, run)

A stretch is a span of time in which one module's own code runs. In the forward the modules' hooks
tell the module. In backward each node of the graph belongs to the module in which it was created,
which its sequence number tells, and a hook before the node marks the start of a stretch. What is
freed between two stretches counts for the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.description.operations import Course
from megatron_lite.memory.measure.engine_storages import EngineStorages
from megatron_lite.memory.measure.meter import running_modules
from megatron_lite.parallel.waiting import gloo_has_freed


class Stretch(NamedTuple):
    """The course of a stretch of one module's code."""

    module: str
    course: Course


class Measured(NamedTuple):
    """The stretches in the order of time, and the most bytes that were alive at any moment."""

    forward: list[Stretch]
    backward: list[Stretch]
    peak_bytes: int


class Courses(EngineStorages):
    """Divides the time into stretches. module: returns the name of the running module."""

    def __init__(self, module: Callable[[], str]) -> None:
        super().__init__()
        self._module = module
        self._stretches: list[Stretch] = []
        self._current: str | None = None
        self._begin = self._most = 0

    def enter(self, module: str) -> None:
        """Begins a stretch unless the module's stretch is under way."""
        if module != self._current:
            self._close()
            self._current, self._begin = module, self.total_bytes()
            self._most = self._begin

    def finish(self) -> list[Stretch]:
        """Ends the last stretch and returns all of them."""
        self._close()
        stretches, self._stretches = self._stretches, []
        return stretches

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.enter(self._module())
        return super().__torch_dispatch__(func, types, args, kwargs)

    def after(self, func: Any) -> None:
        super().after(func)
        self._most = max(self._most, self.total_bytes())

    def _close(self) -> None:
        if self._current is not None:
            course = Course(self._most - self._begin, self.total_bytes() - self._begin)
            self._stretches.append(Stretch(self._current, course))
        self._current = None


def measure(
    model: nn.Module, run: Callable[[], Tensor], finish: Callable[[Tensor], Tensor]
) -> Measured:
    """Measures `loss = finish(run())` and its backward.

    finish: what follows the model. Its stretches have the module "finish".
    """
    marks: list[tuple[int, str]] = []  # from which sequence number on nodes belong to which module
    current = ["finish"]
    with running_modules(model) as running, ExitStack() as stack:

        def mark(*_: Any) -> None:
            current[0] = running[-1] if running else ""
            marks.append((torch.autograd._get_sequence_nr(), current[0]))

        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(mark).remove)
            stack.callback(module.register_forward_hook(mark).remove)
        stack.enter_context(gloo_has_freed())
        with Courses(lambda: current[0]) as watch:
            mark()
            output = run()
            current[0] = "finish"
            marks.append((torch.autograd._get_sequence_nr(), current[0]))
            watch.enter(current[0])
            loss = finish(output)
            del output
            forward = watch.finish()
            _watch_nodes(loss, marks, partial(_begin, watch, current))
            root = torch.ones_like(loss)  # held until the last stretch has ended
            loss.backward(root)
            return Measured(forward, watch.finish(), watch.peak_bytes)


def _begin(watch: Courses, current: list[str], module: str, *_: Any) -> None:
    current[0] = module
    watch.enter(module)


def _watch_nodes(loss: Tensor, marks: list[tuple[int, str]], begin: Callable[..., None]) -> None:
    """Calls `begin(module)` before every node of the graph, except those that hold parameters."""
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [one for one, _ in node.next_functions]
        if not hasattr(node, "variable"):
            number = node._sequence_nr()
            module = next(name for first, name in reversed(marks) if first <= number)
            node.register_prehook(partial(begin, module))
