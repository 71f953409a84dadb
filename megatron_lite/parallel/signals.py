"""Handles signals that end a process.

A command first cleans up, and then ends by the same signal, so that its shell sees which one.
"""

import atexit
import contextlib
import faulthandler
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asks the tool to stop.

    Like KeyboardInterrupt it is not an Exception, so that no `except Exception` on its way
    catches it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Calls `handler` inside the block for the signals STOPPING that are not ignored.

    Only the main thread may set a handler; in another thread nothing changes.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {
            number: signal.signal(number, handler)
            for number in STOPPING
            if signal.getsignal(number) is not signal.SIG_IGN
        }
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raises Stopped inside the block at the first of the signals STOPPING.

    The block can clean up in its `finally` clauses. Later signals are ignored, since they would
    interrupt the cleanup.
    """

    def stop(number: int, _: object) -> None:
        for each in STOPPING:
            if signal.getsignal(each) is stop:
                signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    with _handled_by(stop):
        yield


@contextlib.contextmanager
def postponed() -> Iterator[Callable[[], None]]:
    """Postpones the signals STOPPING to the end of the block, or to a call of what it yields.

    That function raises Stopped if a signal has arrived. An exception from a handler may be lost in
    an import, and below torch's C++ code it may abort the process.
    """
    arrived: list[int] = []

    def check() -> None:
        if arrived:
            raise Stopped(arrived[0])

    with _handled_by(lambda number, _: arrived.append(number)):
        yield check
    check()


@contextlib.contextmanager
def blocked_for_children() -> Iterator[None]:
    """Blocks in this thread the signals that this process handles, for the time of the block.

    Processes that the block starts inherit this. torchrun sends SIGTERM to all of them, and would
    kill the compilers of a run that goes on. The handlers run after the block, or meanwhile if
    another thread takes the signal.
    """
    ours = {
        number
        for number in signal.valid_signals()
        if callable(handler := signal.getsignal(number))
        and handler is not signal.default_int_handler
    }
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def open_streams() -> None:
    """Gives a program that starts its standard streams, on which a crash prints a stack.

    A library may crash, or a data file may be truncated meanwhile (SIGBUS).

    A closed stream becomes the null device. Otherwise the next file would take its number, and what
    libraries print would go into that file.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    faulthandler.enable()


def ctrl_c_ends() -> None:
    """Lets Ctrl-C end a program with one line while it imports its modules, without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def ctrl_c_raises() -> None:
    """Undoes `ctrl_c_ends`."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, _: object) -> NoReturn:
    sys.stderr.write(f"error: {Stopped(number)}\n")
    die_of(number)


def flush_output() -> None:
    """Writes the text that Python holds for standard output and error.

    Text for a full or closed one is dropped. Otherwise Python's own flush at its end would fail,
    and the exit status would be 120.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # it is None, or no file
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def die_of(number: int) -> NoReturn:
    """Ends this process by a signal, so that its shell or launcher sees which one.

    A shell script stops at Ctrl-C only if its command died of SIGINT.
    """
    flush_output()
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    # Process 1 of a container has no default action for signals, so the kill above does nothing.
    os._exit(128 + number)


@contextlib.contextmanager
def safe_output() -> Iterator[None]:
    """Lets a command print any text in the block, also to a program that stops reading.

    Standard output shows ? for a character that its encoding lacks. A file name may have any.

    Once nobody reads standard output, this process ends by SIGPIPE, without a message.
    `command | head` closes the pipe in this way. Python ignores SIGPIPE, so that writing raises
    BrokenPipeError instead. The block's end writes the buffered output. A BrokenPipeError of
    another file passes through. If standard output is full, one line says so, with status 2.
    """
    flush = getattr(sys.stdout, "flush", bool)  # bool: standard output is closed
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        except SystemExit:  # argparse has printed the help
            flush()
            raise
        flush()
    except BrokenPipeError:
        # Standard output has lost its reader if poll reports an error of it.
        poll = select.poll()
        poll.register(1, 0)
        if not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
            raise
        atexit._run_exitfuncs()  # death by a signal skips these functions
        die_of(signal.SIGPIPE)
    except OSError as error:
        if error.filename:
            raise
        try:
            os.write(1, b"\n")  # another file may be full
        except OSError:
            with contextlib.suppress(OSError):
                print(f"error: standard output is not written ({error.strerror})", file=sys.stderr)
            flush_output()
            sys.exit(2)
        raise
