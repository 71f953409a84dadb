"""Runs functions in forks of the test, which end without what Python does at a normal exit."""

import itertools
import os
import signal
import sys
import traceback
from pathlib import Path


def leave(status):
    """Ends this process now: nothing is flushed, and no handler of the test's process runs."""
    os._exit(status)


def start_fork(function):
    """Starts a fork that runs the function and leaves. Returns its process id.

    Its status is the number that the function returns or gives to `sys.exit`, and 0 if it returns
    None. After any other exception it is 1, and the traceback is on stderr.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = function() or 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        leave(status)


def status_of_fork(function):
    """Runs the function in a fork. Returns its status, negative if a signal has ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(start_fork(function), 0)[1])


def children_of(pid):
    """Returns the ids of a process's children, in the order in which they were started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def dies_before(number, functions):
    """Makes this process kill itself before that call of any of these functions.

    functions: the owner and the name of each. number: counted from 0, over all of them.
    """
    calls = itertools.count()

    def dying(function):
        def killed(*args, **options):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return killed

    for owner, name in functions:
        setattr(owner, name, dying(getattr(owner, name)))
