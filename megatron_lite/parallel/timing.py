"""The time that a thread waits for other ranks, and the names of parts for a timer.

Two modules wait for a collective or a message: collectives.py and pipeline/links.py. Each of their
waits is inside `WAITING`. FSDP2 sends through collectives.py too (fsdp.py). A thread outside
`timed_waiting` times nothing and reads no clock. `--log-straggler` reads the times
(supervision/slow_rank.py), and the measurement of a peak waits for gloo.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

GLOO_THREAD, THREADS = "pt_gloo_runloop", Path("/proc/self/task")
LOOK_AGAIN_S = 0.0002
# The kernel may leave a thread waiting for a processor that long on a busy machine.
GIVE_UP_AFTER_S = 60.0

# Returns a context manager that times the block under a name of training/timers.py.
Timed = Callable[[str], AbstractContextManager[object]]
not_timed: Timed = nullcontext  # a context that does nothing


class _Waiting(threading.local):
    """A stopwatch for each thread, used as a context manager around a wait.

    The waits of a thread must not nest. Each thread has its own values, since other threads wait
    at the same time (a pipeline's sends, a save).

    is_timed: whether the thread's waits are timed.
    seconds: the sum of the thread's waits so far.
    frees: whether each wait goes on until gloo has let go of its tensors.
    """

    is_timed = False
    seconds = 0.0
    frees = False
    _start = 0.0

    def __enter__(self) -> None:
        if self.is_timed:
            self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self.is_timed:
            self.seconds += time.perf_counter() - self._start
        if self.frees:
            give_up = time.monotonic() + GIVE_UP_AFTER_S
            while _gloo_runs() and time.monotonic() < give_up:
                time.sleep(LOOK_AGAIN_S)


WAITING = _Waiting()


@contextmanager
def timed_waiting() -> Iterator[None]:
    """Times this thread's waits inside the block: they are added to `WAITING.seconds`."""
    WAITING.is_timed = True
    try:
        yield
    finally:
        WAITING.is_timed = False


@contextmanager
def gloo_has_freed() -> Iterator[None]:
    """Makes this thread wait after each collective until gloo's threads let go of its tensors.

    A thread of gloo holds them until a little after the result is there, and on a busy machine for
    longer than the next operators take. Once it has let go of them, it sleeps. Without the wait
    such a thread may free a tensor, which torch's profiler does not see.
    """
    WAITING.frees = True
    try:
        yield
    finally:
        WAITING.frees = False


def _gloo_runs() -> bool:
    """Returns whether a thread of gloo has work to do, be it that it waits for a processor."""
    for thread in THREADS.glob("*"):
        try:
            name, state = (thread / "stat").read_text().partition("(")[2].rpartition(")")[::2]
        except OSError:  # the thread has ended
            continue
        if name == GLOO_THREAD and state.split()[0] != "S":
            return True
    return False
