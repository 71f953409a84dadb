"""The error messages of the program.

One rank prints one line on standard error, however many ranks meet the fault. The line begins with
the name of the program as the user typed it, such as `megatron-lite train`;
config/invocation.py has the names.
"""

from __future__ import annotations

from megatron_lite.config.checks import InputError
from megatron_lite.parallel.one_voice import await_turn, print_fault

# The seconds that each other rank waits before it reports a fault. Rank 0 reports at once and ends,
# and the launcher ends the waiting ranks. So only one message appears.
SPEAKS_BEFORE_S = 2.0


def report_before_joining(error: InputError, rank: int, program: str) -> None:
    """Prints a fault that was found before the process groups existed.

    Rank 0 prints it if it met the fault. Otherwise a rank that met it does, after a wait.
    """
    await_turn(rank, error, seconds=SPEAKS_BEFORE_S)
    print_fault(error, rank, program=program)
