"""Prints lines besides the log: faults, names of ranks, and lines about slow work.

A fault that several ranks find before they can communicate is reported by one of them. Rank 0
reports its fault at once. Every other rank waits first: once rank 0 has ended, the launcher ends
the ranks that wait. A rank that only has the news of another rank's fault (PeerError) waits
longest. After the ranks have joined the run, the store decides who reports (supervision/watch.py).

Standard library only, so that tools without torch use it.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from typing import TextIO

from megatron_lite.config.checks import PeerError, printable

from .signals import flush_output

MOST_NAMED = 8  # more runs of ranks, or ranks with a text, are counted and not named
# Short work prints nothing. Each wait for the next line is GROWTH times as long as the one before
# it, so that an hour adds 7 lines to the log of a batch job.
FIRST_AFTER_S = 5.0
GROWTH = 3.0


def await_turn(rank: int, fault: BaseException, *, seconds: float) -> None:
    """Returns when this rank may report the fault.

    Rank 0 may report at once, another rank after `seconds`, and a rank with a PeerError after twice
    as long.
    """
    if isinstance(fault, PeerError):
        time.sleep(2 * seconds)
    elif rank:
        time.sleep(seconds)


@contextmanager
def silent_unless(speaks: bool) -> Iterator[None]:
    """Hides Python's standard output and error inside the block, unless `speaks` is true.

    It serves a command line that every rank parses: only one rank prints help and errors.
    """
    if speaks:
        yield
        return
    with (
        open(os.devnull, "w", errors="replace") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Prints a line and flushes it, so that it is visible while the start waits.

    stream: None is standard output. A full or closed stream loses the line, and the run goes on.
    """
    with suppress(OSError):
        print(printable(line), file=stream, flush=True)


def print_fault(message: object, rank: int, *, program: str, always_named: bool = False) -> None:
    """Prints `PROGRAM: [rank 3] error: MESSAGE` on standard error.

    Rank 0 is named only if `always_named` is true.
    """
    name = f"[rank {rank}] " if rank or always_named else ""
    text = f"{program}{': ' if program else ''}{name}error: {message}"
    print_line(text, sys.stderr)
    flush_output()  # the program ends: its exit status must be that of the fault


def ranks_text(ranks: Iterable[int]) -> str:
    """Returns `rank 3`, `ranks 0, 1` or `ranks 0-3, 8`, with at most MOST_NAMED such parts."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs[:MOST_NAMED]
    ]
    more = sum(map(len, runs[MOST_NAMED:]))
    name = "rank" if sum(map(len, runs)) == 1 else "ranks"
    return f"{name} {', '.join(parts)}" + f" and {more} more" * bool(more)


def by_rank(texts: Sequence[str]) -> str:
    """Returns "rank 3: TEXT; rank 5: TEXT" for the ranks whose text is not empty.

    At most MOST_NAMED ranks are named; the rest is counted.
    """
    told = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    more = len(told) - MOST_NAMED
    return "; ".join(told[:MOST_NAMED]) + f"; and {more} more ranks" * (more > 0)


@contextmanager
def told_if_slow(what: str, say: Callable[[str], object]) -> Iterator[None]:
    """Calls `say` with a line while the block runs, if it runs long, and once when it has ended.

    A thread of its own calls `say`; it has ended when the block has.
    what: names the work, such as "building the model".
    say: raises no error.
    """
    ended, began, told = threading.Event(), time.monotonic(), threading.Event()

    def watch() -> None:
        due = FIRST_AFTER_S
        while not ended.wait(max(0.0, began + due - time.monotonic())):
            say(f"{what}: {time.monotonic() - began:.0f} s so far")
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


def told_by_rank_0(what: str, rank: int) -> AbstractContextManager[None]:
    """Returns the context of work before the log is open. Rank 0 prints its lines."""
    return nullcontext() if rank else told_if_slow(what, print_line)


def told_on_terminal(what: str) -> AbstractContextManager[None]:
    """Returns the context of a tool's work: lines on standard error, if it is a terminal.

    A file or a pipe gets none, so that the output of a tool does not depend on the machine's speed.
    what: names the work and what is counted, such as "plans for 16 GPUs (number 2 of 3)".
    """
    if not sys.stderr.isatty():
        return nullcontext()
    return told_if_slow(what, lambda line: print_line(line, sys.stderr))
