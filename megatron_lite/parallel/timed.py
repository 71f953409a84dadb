"""Names parts of the code for a timer that may not run (training/timers.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

# Returns a context manager that times the block under a name of training/timers.py.
Timed = Callable[[str], AbstractContextManager[object]]
_NOTHING = nullcontext()


def not_timed(_: str) -> AbstractContextManager[object]:
    """Returns a context manager that does nothing and reads no clock."""
    return _NOTHING
