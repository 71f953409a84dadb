"""Measures how long a thread waits for other ranks, for `--log-straggler`.

supervision/slow_rank.py reads the result. Three modules wait for a collective or a message:
collectives.py, ring.py and pipeline/links.py. Each of their waits is inside
`WAITING`. FSDP2 sends through collectives.py too (fsdp_buffers.py). A thread outside
`timed_waiting` times nothing and reads no clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Waiting(threading.local):
    """A stopwatch for each thread, used as a context manager around a wait.

    The waits of a thread must not nest. Each thread has its own values, since other threads wait
    at the same time (a pipeline's sends, a save).

    is_timed: whether the thread's waits are timed.
    seconds: the sum of the thread's waits so far.
    """

    is_timed = False
    seconds = 0.0
    _start = 0.0

    def __enter__(self) -> None:
        if self.is_timed:
            self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self.is_timed:
            self.seconds += time.perf_counter() - self._start


WAITING = _Waiting()


@contextmanager
def timed_waiting() -> Iterator[None]:
    """Times this thread's waits inside the block: they are added to `WAITING.seconds`."""
    WAITING.is_timed = True
    try:
        yield
    finally:
        WAITING.is_timed = False
