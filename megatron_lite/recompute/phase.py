"""Whether this thread runs a replay. Side effects (counters, logs) check it to happen only once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_phase = threading.local()


def is_recomputing() -> bool:
    """True inside a replay, at any depth of nesting."""
    return getattr(_phase, "depth", 0) > 0


@contextmanager
def recomputing() -> Iterator[None]:
    """Marks the block as a replay. Blocks may nest, and an exception ends the mark too."""
    _phase.depth = getattr(_phase, "depth", 0) + 1
    try:
        yield
    finally:
        _phase.depth -= 1
