"""Tells the user that work goes on if it takes more than a few seconds.

Short work prints nothing. Each wait is three times as long as the one before it, so that an hour
adds 7 lines to the log of a batch job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from megatron_lite.parallel.one_voice import print_line
from megatron_lite.parallel.state import ParallelState

FIRST_AFTER_S = 5.0
GROWTH = 3.0


@contextmanager
def told_if_slow(
    what: str, say: Callable[[str], object], *, first_after_s: float = FIRST_AFTER_S
) -> Iterator[None]:
    """Calls `say` with a line while the block runs, if it runs long, and once when it has ended.

    A thread of its own calls `say`; it has ended when the block has.
    what: names the work, such as "building the model".
    first_after_s: seconds until the first line.
    """
    ended, began, told = threading.Event(), time.monotonic(), threading.Event()

    def watch() -> None:
        due = first_after_s
        while not ended.wait(max(0.0, began + due - time.monotonic())):
            try:
                say(f"{what}: {time.monotonic() - began:.0f} s so far")
            except OSError:  # standard output is full or closed, which ends no run
                return
            told.set()
            due *= GROWTH

    thread = threading.Thread(target=watch, name="slow work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if told.is_set():
        say(f"{what}: done after {time.monotonic() - began:.1f} s")


def told_by_rank_0(what: str, parallel: ParallelState) -> AbstractContextManager[None]:
    """Returns the context of work before the log is open. Rank 0 prints its lines."""
    return nullcontext() if parallel.rank else told_if_slow(what, print_line)
