"""Records whether this thread runs a replay, or allocates host memory, and which modules run.

Side effects (counters, logs) check for a replay to happen only once. Measurements check for host
memory, which on a CPU looks like any other tensor.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn


class _Phase(threading.local):
    is_replay = False
    on_host = False


_phase = _Phase()


def is_recomputing() -> bool:
    """True inside a replay, at any depth of nesting."""
    return _phase.is_replay


def is_allocating_on_host() -> bool:
    """True while memory for tensors that leave the device is allocated."""
    return _phase.on_host


@contextmanager
def _marked(mark: str) -> Iterator[None]:
    """Sets a mark inside the block. Blocks may nest, and an exception ends the mark too."""
    before = getattr(_phase, mark)
    setattr(_phase, mark, True)
    try:
        yield
    finally:
        setattr(_phase, mark, before)


recomputing = partial(_marked, "is_replay")  # around a replay
allocating_on_host = partial(_marked, "on_host")  # what the block allocates is host memory


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
            stack.enter_context(module.register_forward_pre_hook(partial(enter, name)))
            stack.enter_context(module.register_forward_hook(leave, always_call=True))
        yield running
