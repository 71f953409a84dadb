"""Where a rank is, for the watch over it (watch.py). The training loop writes it; nothing is sent."""

from __future__ import annotations

import time

START_UP = "start-up"


class Pulse:
    """where: for messages. moves: how often it has changed. longest: seconds of the longest limited stretch between two moves.

    A stretch is limited where no later one should take much longer: not the first iteration, which compiles, and not the
    writing of a checkpoint.
    """

    def __init__(self) -> None:
        self.where, self.moves, self.longest = START_UP, 0, 0.0
        self._limited, self._since = False, time.monotonic()

    def at(self, where: str, *, limited: bool = True) -> None:
        """The rank has come so far."""
        now = time.monotonic()
        if self._limited:
            self.longest = max(self.longest, now - self._since)
        self._since = now  # before _limited: the watch reads both from another thread
        self.where, self._limited = where, limited
        self.moves += 1

    def seconds_left(self, timeout: float) -> float | None:
        """Until this stretch takes `timeout` seconds longer than the longest before it; None where it is not limited."""
        return timeout + self.longest - (time.monotonic() - self._since) if self._limited else None
