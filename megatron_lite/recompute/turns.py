"""Lets one thread at a time run a forward or a replay of the layers under one policy.

A replay exchanges the state of its layer and of the generators, and another thread must not see it.
The threads in which autograd works for a device are let through: they work for a thread that waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 120.0


class Turns:
    """A lock that can be copied and pickled with a model; the copy is another lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Waits until no other thread is inside.

        RuntimeError: another thread stays inside; it may wait for this one.
        """
        if threading.get_ident() not in {each.ident for each in threading.enumerate()}:
            yield
            return
        if not self._lock.acquire(timeout=PATIENCE_S):
            raise RuntimeError(
                "another thread has been inside a layer with a recompute policy for "
                f"{PATIENCE_S:.0f} s. Layers that wait for each other in several threads cannot be "
                "recomputed: take them out of the policy"
            )
        try:
            yield
        finally:
            self._lock.release()
