"""Whether this thread is rebuilding activations: side effects (counters, logs) look here, so that they happen once."""

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
    """Marks a replay. Nests, and ends with the block, by an exception too."""
    _phase.depth = getattr(_phase, "depth", 0) + 1
    try:
        yield
    finally:
        _phase.depth -= 1
