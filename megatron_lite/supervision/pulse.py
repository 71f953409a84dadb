"""Records where a rank is, for the watch over it (watch.py).

The training loop writes it in memory and sends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

START_UP = "start-up"


class Pulse:
    """The place where a rank is, and the time that it may stay there.

    where: the place, for messages.
    moves: how often the place has changed.
    longest: the seconds of the longest limited stretch between two moves.
    clock: returns the seconds of a clock that never goes back.

    A stretch is limited if no later stretch should take much longer. The first iteration, which
    compiles, and the writing of a checkpoint are not limited. If the batch grows
    (--rampup-batch-size), an iteration may take longer by the same factor.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.where, self.moves, self.longest = START_UP, 0, 0.0
        self._clock, self._limited, self._since = clock, False, clock()

    def at(self, where: str, *, limited: bool = True, growth: float = 1.0) -> None:
        """Records that the rank begins a new stretch.

        limited: whether the stretch has a time limit.
        growth: the work of this stretch divided by that of the stretch before, if it is more.
        """
        now = self._clock()
        # Without any measured stretch, the first iteration (unlimited) still serves to be scaled.
        if self._limited or (growth > 1.0 and not self.longest):
            self.longest = max(self.longest, now - self._since)
        self.longest *= growth
        # Set before _limited, because the watch thread reads both: it must never combine the new
        # limit with the old start.
        self._since = now
        self.where, self._limited = where, limited
        self.moves += 1

    def seconds_left(self, timeout: float) -> float | None:
        """Returns the seconds until this stretch exceeds its limit; None if it is not limited.

        The limit is `timeout` seconds more than the longest limited stretch before it.
        """
        return timeout + self.longest - (self._clock() - self._since) if self._limited else None
