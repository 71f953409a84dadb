"""Restores the global generators of Python and NumPy for replays of layers that draw from them.

An example is a layer that is skipped at random. The states are large, and few layers draw from
these generators. So a state is kept only if the forward has changed it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class HostRandomness:
    """The states of both generators before a forward.

    Make it before the forward, call `settle` after the forward, and `replayed` around each replay.
    """

    def __init__(self) -> None:
        self._python: Any = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=False)

    def settle(self) -> None:
        """Drops the state of a generator that the forward did not draw from."""
        if random.getstate() == self._python:
            self._python = None
        if _position(np.random.get_state(legacy=False)) == _position(self._numpy):
            self._numpy = None

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Makes draws inside the block repeat those of the forward.

        After the block the generators continue as if nothing had been drawn in it.
        """
        python = random.getstate() if self._python is not None else None
        numpy: Any = np.random.get_state(legacy=False) if self._numpy is not None else None
        try:
            # `settle` has dropped the state of a generator that the forward did not use.
            if python is not None:
                random.setstate(self._python)
            if numpy is not None:
                np.random.set_state(self._numpy)
            yield
        finally:
            if python is not None:
                random.setstate(python)
            if numpy is not None:
                np.random.set_state(numpy)


def _position(state: Any) -> tuple[Any, ...]:
    """Returns the parts of a NumPy state that a draw changes.

    These are the place in the current block of numbers, the block itself, and a stored normal
    number. The state is a dictionary with an array in it, which `==` cannot compare.
    """
    inner = state["state"]
    return inner["pos"], inner["key"].tobytes(), state["has_gauss"], state["gauss"]
