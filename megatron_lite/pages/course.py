"""The values of one figure by iteration, of a run that may go back to an earlier iteration."""

from __future__ import annotations

import heapq
import math

LARGEST, SMALLEST = 1e100, 1e-100  # sums and ratios of such figures stay finite


class FigureCourse(dict[int, float]):
    """Values by iteration.

    Going back is cheap: it looks at the iterations that it drops, and at no others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: list[int] = []  # a heap of the iterations, negative: the last one comes first

    def __setitem__(self, iteration: int, value: float) -> None:
        if iteration not in self:
            heapq.heappush(self._last, -iteration)
        super().__setitem__(iteration, value)

    def forget_after(self, iteration: int) -> None:
        """Drops the values after an iteration, which the run computes again after a restart."""
        while self._last and -self._last[0] > iteration:
            del self[-heapq.heappop(self._last)]


def figure(value: object) -> float | None:
    """Returns a value if it is a number that a run may have, else None. true and false are 1 and
    0."""
    if not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if not math.isfinite(number) or abs(number) > LARGEST:
        return None
    return number if abs(number) >= SMALLEST else 0.0
