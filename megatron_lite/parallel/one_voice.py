"""Makes one rank report a fault that several ranks find before they can communicate.

Rank 0 reports its fault at once. Every other rank waits first: once rank 0 has ended, the launcher
ends the ranks that wait. A rank that only has the news of another rank's fault (PeerError) waits
longest. After the ranks have joined the run, the store decides who reports (supervision/watch.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from megatron_lite.config.checks import PeerError
from megatron_lite.config.parser import for_stream


def await_turn(rank: int, fault: BaseException, *, seconds: float) -> None:
    """Returns when this rank may report the fault.

    Rank 0 may report at once, another rank after `seconds`, and a rank with a PeerError after twice
    as long.
    """
    if isinstance(fault, PeerError):
        time.sleep(2 * seconds)
    elif rank:
        time.sleep(seconds)


@contextlib.contextmanager
def silent_unless(speaks: bool) -> Iterator[None]:
    """Hides Python's standard output and error inside the block, unless `speaks` is true.

    It serves a command line that every rank parses: only one rank prints help and errors.
    """
    if speaks:
        yield
        return
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def print_line(line: str) -> None:
    """Prints a line and flushes it, so that it is visible while the start waits."""
    print(line, flush=True)


def print_fault(
    message: object, rank: int, *, program: str = "", always_named: bool = False
) -> None:
    """Prints `PROGRAM: [rank 3] error: MESSAGE` on standard error.

    Rank 0 is named only if `always_named` is true.
    """
    name = f"[rank {rank}] " if rank or always_named else ""
    text = f"{program}{': ' if program else ''}{name}error: {message}"
    print(for_stream(text, sys.stderr), file=sys.stderr, flush=True)
