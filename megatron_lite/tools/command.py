"""What the command-line tools share: how a fault in the input ends them, said once however many ranks meet it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator

from megatron_lite.config.checks import InputError
from megatron_lite.parallel.launch import read_launch

# A fault that all ranks meet is reported once: the launcher ends the others while they wait.
RANK_0_SPEAKS_FIRST_S = 5.0


def exit_status(command: Callable[[], None]) -> int:
    """Runs the command. 0 when done; 2 with `error: ...` on stderr for what the user can mend, without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows ? in its place
    try:
        command()
    except (InputError, OSError) as error:
        rank = _rank()
        if rank != 0:
            time.sleep(RANK_0_SPEAKS_FIRST_S)
        print(f"{f'[rank {rank}] ' if rank else ''}error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


@contextlib.contextmanager
def rank_0_speaks() -> Iterator[None]:
    """For reading the command line, whose faults every rank meets: the other ranks print nothing and end after rank 0."""
    if _rank() == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        try:
            yield
        except SystemExit:
            time.sleep(RANK_0_SPEAKS_FIRST_S)
            raise


def _rank() -> int:
    """0 too where the launcher's variables are at fault: a tool that needs them says so itself."""
    try:
        return read_launch().rank
    except InputError:
        return 0
