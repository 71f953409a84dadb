"""Named random-number streams on one device.

A draw on the device's default generator belongs to the *current* stream: DEFAULT, unless a `fork` is open. DEFAULT is the
same on every tensor-parallel rank (residual dropout, whose input is replicated); TENSOR_PARALLEL differs per rank (attention
dropout always, and residual dropout under sequence parallelism, where each rank holds other tokens).

The stored state of a stream is always up to date: opening a fork first stores the state of the stream that it leaves. So a
fork of a name inside a fork of the same name goes on with that stream, and never replays stale numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

DEFAULT = "default"
TENSOR_PARALLEL = "tensor_parallel"


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part and on their order, the same on each machine."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@dataclass(frozen=True)
class RngSnapshot:
    """Every stream's state, and the name of the stream that was current. Nobody writes into a state."""

    current: str
    states: dict[str, Tensor]


class Generators(Protocol):
    """All that a replay may draw from, as one: its state can be read and put back."""

    device: torch.device

    def snapshot(self) -> RngSnapshot: ...

    def restore(self, snapshot: RngSnapshot) -> None: ...


class RngStreams:
    """The streams of one rank. Owns the device's default generator while it lives.

    dp_rank: counts all ranks that hold other tokens. pp_rank: those with other layers.
    """

    def __init__(self, device: torch.device, *, seed: int, tp_rank: int = 0, dp_rank: int = 0, pp_rank: int = 0) -> None:
        self.device = device
        self.current = DEFAULT
        self._states: dict[str, Tensor] = {}
        for name, rank in ((TENSOR_PARALLEL, tp_rank), (DEFAULT, 0)):
            self._seed(derive_seed("stream", seed, name, dp_rank, rank, *([pp_rank] if pp_rank else [])))
            self._states[name] = self._get()

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Draws inside come from stream `name`; the stream that was current goes on where it stopped. KeyError if unknown."""
        previous = self.current
        self._switch(name)
        try:
            yield
        finally:
            self._switch(previous)

    def state(self) -> Tensor:
        """A copy of the current stream's state."""
        return self._get()

    @contextmanager
    def drawn_from(self, state: Tensor) -> Iterator[None]:
        """Draws inside repeat those after `state`; no stream notices."""
        before = self._get()
        self._set(state)
        try:
            yield
        finally:
            self._set(before)

    def snapshot(self) -> RngSnapshot:
        """All streams as they are now, and will stay in the snapshot."""
        self._states[self.current] = self._get()
        return RngSnapshot(self.current, dict(self._states))

    def restore(self, snapshot: RngSnapshot) -> None:
        """Puts every stream and the current name back; the snapshot stays usable. ValueError if the names differ."""
        if set(snapshot.states) != set(self._states):
            raise ValueError(f"snapshot has the streams {sorted(snapshot.states)}, this rank has {sorted(self._states)}")
        self._states = dict(snapshot.states)
        self.current = snapshot.current
        self._set(self._states[self.current])

    def _switch(self, name: str) -> None:
        if name == self.current:
            return
        state = self._states[name]
        self._states[self.current] = self._get()
        self._set(state)
        self.current = name

    # The state of a CUDA generator lives on the host: none of these waits for the device.
    def _get(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _set(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)

    def _seed(self, seed: int) -> None:
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
