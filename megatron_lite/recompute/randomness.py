"""The states of random-number generators and of autocast, which a replay repeats.

`Randomness` is of torch's default generators, whose states are kept like saved tensors.
`GeneratorState` is of any other generator that a layer holds or gets, and of the global generators
of NumPy and Python.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import string_at
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from megatron_lite.parallel.rng import RngSnapshot

CPU = "cpu"


class Generators(Protocol):
    """All the generators that a replay may draw from. Their state can be read and restored."""

    device: torch.device

    def snapshot(self) -> RngSnapshot: ...

    def restore(self, snapshot: RngSnapshot) -> None: ...


class Randomness(NamedTuple):
    """The states of all generators that a replay may draw from.

    generator: the named streams.
    current: the name of the current stream.
    states: one state for each named stream, and that of the CPU generator, unless the streams
        already are on the CPU. None in place of a state that another keeps.
    """

    generator: Generators
    current: str
    states: dict[str, Any]

    @classmethod
    def of(cls, streams: Generators) -> Randomness:
        """Returns the present states."""
        current, states = streams.snapshot()
        # On the CPU the current stream uses the CPU generator, so the snapshot has its state
        # already.
        cpu = {} if streams.device.type == CPU else {CPU: torch.get_rng_state()}
        return cls(streams, current, states | cpu)

    def restore(self) -> None:
        """Puts the generators into the states."""
        states = dict(self.states)
        if self.generator.device.type != CPU:
            torch.set_rng_state(states.pop(CPU))
        self.generator.restore(RngSnapshot(self.current, states))


class DefaultGenerators:
    """torch's default generators of the CPU and of these devices, as one stream."""

    device = torch.device(CPU)  # the snapshots have the state of the CPU generator

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._all = {CPU: torch.default_generator} | {
            str(device): torch.cuda.default_generators[device.index]
            for device in devices
            if device.type == "cuda"
        }

    def snapshot(self) -> RngSnapshot:
        """Returns the present states."""
        return RngSnapshot(CPU, {name: each.get_state() for name, each in self._all.items()})

    def restore(self, snapshot: RngSnapshot) -> None:
        """Puts the states of a snapshot back."""
        for name, state in snapshot.states.items():
            self._all[name].set_state(state)


ARRAYS = bytearray, array, np.ndarray
# kind: (reads the state, sets it)
_ACCESS: dict[type, tuple[Any, Any]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (
        attrgetter("bit_generator.state"),
        lambda each, state: setattr(each.bit_generator, "state", state),
    ),
    np.random.BitGenerator: (
        attrgetter("state"),
        lambda each, state: setattr(each, "state", state),
    ),
    np.random.RandomState: (
        lambda each: each.get_state(legacy=False),
        lambda each, state: each.set_state(state),
    ),
}
_DRAWS: tuple[Any, ...] = (random.random, np.random.random_sample)
GLOBAL = [each.__self__ for each in _DRAWS]


def global_states() -> list[GeneratorState]:
    """Returns the states of GLOBAL. The list is the same one as before if none has drawn since.

    To read the states takes 0.1 ms, so it reads them only if the memory that holds them differs.
    """
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    held = (*map(_memory, (*GLOBAL, bits)), GLOBAL[0].gauss_next)
    return _states_at(held if type(bits).__module__.startswith("numpy.random.") else object())


@lru_cache(maxsize=1)
def _states_at(held: Any) -> list[GeneratorState]:
    return [*map(GeneratorState.of, GLOBAL)]


def _memory(generator: Any) -> bytes:
    """Returns the bytes of an object of C behind its head: its state is among them."""
    return string_at(id(generator), type(generator).__basicsize__)[object.__basicsize__ :]


@contextmanager
def globals_at(states: list[GeneratorState]) -> Iterator[None]:
    """Gives GLOBAL these states of `global_states` inside the block, and then its present ones.

    A layer may have drawn though it left the states as it found them.
    """
    now = global_states()
    try:
        for each in states if states is not now else ():
            each.restore()
        yield
    finally:
        for each in now if states and global_states() is not now else ():
            each.restore()


def is_generator(value: Any) -> bool:
    """Tells whether the value is a generator whose state can be restored."""
    return isinstance(value, tuple(_ACCESS)) and not isinstance(value, random.SystemRandom)


class GeneratorState(NamedTuple):
    """A generator that a layer holds or gets, or a global one of Python or NumPy, and a state."""

    generator: Any
    state: Any

    @classmethod
    def of(cls, generator: Any) -> GeneratorState:
        """Returns the generator with its present state."""
        return cls(generator, _access(generator)[0](generator))

    def is_changed(self) -> bool:
        """Tells whether the generator has drawn since."""
        return bool(_bits(GeneratorState.of(self.generator).state) != _bits(self.state))

    def restore(self) -> None:
        """Puts the generator into the state."""
        _access(self.generator)[1](self.generator, self.state)


def _access(generator: Any) -> tuple[Any, Any]:
    return next(access for kind, access in _ACCESS.items() if isinstance(generator, kind))


def _bits(state: Any) -> Any:
    """Returns a state in a form that can be compared."""
    if isinstance(state, dict):
        return {name: _bits(each) for name, each in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


@contextmanager
def drawn_again(states: Iterable[GeneratorState | Randomness]) -> Iterator[None]:
    """Makes the generators repeat inside the block the draws that followed these states.

    After the block they continue as if nothing had been drawn in it.
    """
    states = list(states)
    before = [type(each).of(each.generator) for each in states]
    try:
        for each in states:
            each.restore()
        yield
    finally:
        for each in before:
            each.restore()


def autocast_states(kinds: set[str]) -> list[dict[str, Any]]:
    """Returns the present autocast settings, one for each kind of device.

    Each is a dictionary of keyword arguments for torch.autocast.
    """
    return [
        dict(
            device_type=kind,
            enabled=torch.is_autocast_enabled(kind),
            dtype=torch.get_autocast_dtype(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for kind in sorted(kinds)
        if torch.amp.is_autocast_available(kind)
    ]


@contextmanager
def casts_not_cached() -> Iterator[None]:
    """Keeps autocast from caching the casts of weights inside the block, which runs under no_grad.

    torch 2.8 gives such a cast, which has no history, to a replay in the same autocast. The weight
    would get no gradient.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
