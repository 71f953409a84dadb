"""The results of computations that a search repeats. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

Result = TypeVar("Result")


class Memo:
    """Results by key, each computed once.

    A memo belongs to one model on one machine: keys name neither. A key must name everything else
    that decides the result.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, object] = {}

    def once(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Returns the result for the key, computed at the first call."""
        if key not in self._results:
            self._results[key] = compute()
        return cast(Result, self._results[key])
