"""Repeats the draws of generators that a layer holds or gets: torch's, NumPy's and Python's.

The global generators of NumPy and Python are among them. Those of torch are the matter of
randomness.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

# kind: (reads the state, sets it)
_ACCESS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    np.random.Generator: (
        lambda each: each.bit_generator.state,
        lambda each, state: setattr(each.bit_generator, "state", state),
    ),
    np.random.BitGenerator: (
        lambda each: each.state,
        lambda each, state: setattr(each, "state", state),
    ),
    np.random.RandomState: (
        lambda each: tuple(
            part.tobytes() if isinstance(part, np.ndarray) else part for part in each.get_state()
        ),
        lambda each, state: each.set_state(
            (state[0], np.frombuffer(state[1], dtype=np.uint32), *state[2:])
        ),
    ),
    random.Random: (random.Random.getstate, random.Random.setstate),
}
_KINDS = tuple(_ACCESS)
# The global generators, which the functions of both modules are methods of.
GLOBAL = (random.random.__self__, np.random.random_sample.__self__)  # type: ignore[attr-defined]


def is_generator(value: Any) -> bool:
    """Tells whether the value is a generator whose state can be restored."""
    return isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)


class GeneratorState(NamedTuple):
    """A generator and one of its states."""

    generator: Any
    state: Any

    @classmethod
    def of(cls, generator: Any) -> GeneratorState:
        """Returns the generator with its present state."""
        return cls(generator, _access(generator)[0](generator))

    def is_changed(self) -> bool:
        """Tells whether one of the global generators has drawn since."""
        return bool(GeneratorState.of(self.generator).state != self.state)

    def restore(self) -> None:
        """Puts the generator into the state."""
        _access(self.generator)[1](self.generator, self.state)


def _access(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    return next(access for kind, access in _ACCESS.items() if isinstance(generator, kind))


@contextmanager
def drawn_again(states: Iterable[GeneratorState]) -> Iterator[None]:
    """Makes the generators repeat inside the block the draws that followed these states.

    After the block they continue as if nothing had been drawn in it.
    """
    states = list(states)
    before = [GeneratorState.of(each.generator) for each in states]
    try:
        for each in states:
            each.restore()
        yield
    finally:
        for each in before:
            each.restore()
