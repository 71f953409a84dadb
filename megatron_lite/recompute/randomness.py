"""The states of random-number generators and of autocast, which a replay repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.parallel.rng import Generators, RngSnapshot
from megatron_lite.recompute.saved import SavedValue


class StreamNames(NamedTuple):
    """The name of the current stream, and the names of all streams in the order of their states."""

    current: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Randomness:
    """The states of all generators that a replay may draw from.

    states: one state for each named stream. The state of the CPU generator follows, unless the
        streams already are on the CPU.
    """

    streams: Generators
    names: StreamNames
    states: Sequence[Tensor]

    @classmethod
    def now(cls, streams: Generators) -> Randomness:
        """Returns the present states."""
        snapshot = streams.snapshot()
        # On the CPU the current stream uses the CPU generator, so the snapshot has its state
        # already.
        cpu = () if streams.device.type == "cpu" else (torch.get_rng_state(),)
        return cls(
            streams,
            StreamNames(snapshot.current, tuple(snapshot.states)),
            (*snapshot.states.values(), *cpu),
        )

    def copies(self) -> list[Tensor]:
        """Returns copies of the states, each in its own storage.

        Snapshots share the tensors of streams that did not draw in between. With copies, each call
        keeps as many bytes as the memory model predicts for it.
        """
        return [state.clone() for state in self.states]

    def kept(self) -> Callable[[], Randomness]:
        """Keeps the states through the saved-tensor hooks in force; the result returns them."""
        streams, names = self.streams, self.names
        states = [SavedValue(state) for state in self.copies()]
        return lambda: Randomness(streams, names, [state.tensor() for state in states])

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Makes draws inside the block repeat those after the snapshot.

        After the block the generators continue as if nothing had been drawn in it.
        """
        before = Randomness.now(self.streams)
        self._restore()
        try:
            yield
        finally:
            before._restore()

    def _restore(self) -> None:
        self.streams.restore(
            RngSnapshot(self.names.current, dict(zip(self.names.names, self.states, strict=False)))
        )
        # The state of the CPU generator, if it was kept, has no name and comes last.
        for cpu in self.states[len(self.names.names) :]:
            torch.set_rng_state(cpu)


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
