"""Tells the user that work goes on if it takes more than a few seconds.

Short work prints nothing. Each wait is three times as long as the one before it, so that an hour
adds 7 lines to the log of a batch job. Standard library only, so that tools without torch use it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

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
            except OSError:  # standard output is full or closed, and the run goes on
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


def told_on_terminal(
    what: str, *, first_after_s: float = FIRST_AFTER_S
) -> AbstractContextManager[None]:
    """Returns the context of a tool's work: lines on standard error, if it is a terminal.

    A file or a pipe gets none, so that the output of a tool does not depend on the machine's speed.
    what: names the work and what is counted, such as "plans for 16 GPUs (number 2 of 3)".
    """
    if not sys.stderr.isatty():
        return nullcontext()
    return told_if_slow(
        what, lambda line: print(line, file=sys.stderr, flush=True), first_after_s=first_after_s
    )
