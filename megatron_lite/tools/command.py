"""The end of a command-line tool. A fault in the input is printed once, even if many ranks find
it."""

import atexit
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from megatron_lite.config.checks import InputError, quoted
from megatron_lite.config.run_flags import Parser
from megatron_lite.parallel.launch import read_launch
from megatron_lite.parallel.messages import await_turn, print_fault, silent_unless
from megatron_lite.parallel.signals import Stopped, die_of, safe_output, stoppable

# A fault that all ranks find is printed once: the launcher ends the other ranks while they wait.
RANK_0_SPEAKS_FIRST_S = 5.0
LONGEST_MESSAGE = 900


def exit_status(command: Callable[[], object], program: str = "") -> int:
    """Runs the command. Returns the exit status: what the command returns, or 0 for None.

    program: its name, as the user typed it, with which each message begins.

    A fault that the user can mend returns 2, with `PROGRAM: error: ...` on stderr and no
    traceback. After Ctrl-C, SIGTERM or SIGHUP the command removes its partial files. One line
    reports the signal, and the process dies of it, as a shell expects. It also dies, of SIGPIPE and
    without a message, once nobody reads its output.
    """
    try:
        with stoppable(), safe_output():
            status = command()
            return status if isinstance(status, int) else 0
    except (InputError, OSError) as error:
        rank = _rank()
        await_turn(rank, error, seconds=RANK_0_SPEAKS_FIRST_S)
        print_fault(_text(error), rank, program=program)
        return 2
    except Stopped as stopped:
        number, text = stopped.number, str(stopped)
    if _rank() == 0:
        print_fault(text, 0, program=program)
    # Death by a signal skips these functions, and a pool's semaphores would stay, with a warning.
    atexit._run_exitfuncs()
    die_of(number)


def tool(
    program: str,
    description: str,
    add_flags: Callable[[Parser], object],
    run: Callable[[Namespace], object],
    **options: Any,
) -> Callable[..., int]:
    """Returns the `main` of a tool: it runs the command line and returns the exit status.

    program: the tool's name, unless `main` gets another one.
    options: further ones of the parser.
    """

    def main(argv: Sequence[str] | None = None, name: str = program) -> int:
        parser = Parser(prog=name, description=description, **options)
        add_flags(parser)
        rank = _rank()
        with silent_unless(rank == 0):  # every rank finds the same faults
            try:
                args = parser.parse_args(argv)
            except SystemExit as stop:
                await_turn(rank, stop, seconds=RANK_0_SPEAKS_FIRST_S)
                raise
        return exit_status(lambda: run(args), name)

    return main


def check_ending(flag: str, path: str, *endings: str) -> None:
    """Raises InputError if the name of a file has another ending."""
    if os.path.splitext(path)[1] not in endings:
        raise InputError(f"{flag} {quoted(path)} must end in {' or '.join(endings)}")


def _text(error: InputError | OSError) -> str:
    """Returns the message of an error, of at most LONGEST_MESSAGE characters.

    That of a file begins with the name of the file. A file from outside may hold long names.
    """
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE - 100]} ... {text[-90:]}"


def _rank() -> int:
    """Returns this process's rank. It is 0 also if the launcher's variables are wrong, which a tool
    that needs them reports itself."""
    try:
        return read_launch().rank
    except InputError:
        return 0
