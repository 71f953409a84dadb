"""The exit status of the program, and the errors that end it outside of the supervised part.

These are the errors before the rank joins the process groups, and after it has left them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from megatron_lite.cli.messages import report_before_joining
from megatron_lite.config.checks import InputError
from megatron_lite.config.invocation import SCRIPT
from megatron_lite.parallel.launch import Launch, read_launch
from megatron_lite.parallel.one_voice import print_fault
from megatron_lite.parallel.signals import die_of, dies_without_reader


def exit_status(run: Callable[[Launch], int], program: str = SCRIPT) -> int:
    """Returns `run(launch)`, or 2 after an InputError.

    program: the name with which each message begins.

    After Ctrl-C the process ends by SIGINT itself, as a shell expects. It ends by SIGPIPE if nobody
    reads the output of `--help`, `--dump-config` or `--explain-recompute` to its end.
    """
    rank = 0
    try:
        launch = read_launch()
        rank = launch.rank
        with dies_without_reader():
            return run(launch)
    except InputError as error:
        report_before_joining(error, rank, program)
        return 2
    except KeyboardInterrupt:
        if rank == 0:
            print_fault("stopped by SIGINT", rank, program=program)
        die_of(signal.SIGINT)
