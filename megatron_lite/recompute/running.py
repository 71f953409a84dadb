"""The modules whose forward is running, by forward hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn


@contextmanager
def running_modules(model: nn.Module | None) -> Iterator[list[str]]:
    """Yields a list that always holds the qualified names of the modules whose forward is running.

    The outermost comes first. Without a model the list stays empty.
    """
    running = []

    def enter(name: str, *_: Any) -> None:
        running.append(name)

    def leave(*_: Any) -> None:
        running.pop()

    with ExitStack() as stack:
        for name, module in [] if model is None else model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(enter, name)).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield running
