"""Named random-number streams on one device.

A draw on the device's default generator belongs to the *current* stream, which is DEFAULT unless a
`fork` is open.

    DEFAULT           the same on every TP rank       residual dropout, whose input is replicated
    TENSOR_PARALLEL   different on every TP rank      attention dropout; residual dropout under
                                                      sequence parallelism, whose tokens are sharded

The stored state of a stream is always up to date: a fork first stores the state of the stream that
it leaves. A fork inside a fork of the same name continues the stream and never repeats numbers.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEFAULT = "default"
TENSOR_PARALLEL = "tensor_parallel"


class RngSnapshot(NamedTuple):
    """The state of every stream, and the name of the stream that was current.

    The state tensors are shared between snapshots and must not be modified.
    """

    current: str
    states: dict[str, Tensor]


def derive_seed(*parts: object) -> int:
    """Returns a 63-bit seed that depends on every part and on their order.

    The seed is the same on every machine.
    """
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def default_generator(device: torch.device) -> torch.Generator:
    """Returns torch's generator for a device. A CUDA generator's state is in host memory, so
    reading it does not wait for the device."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    known = torch.cuda.default_generators
    return known[torch.cuda.current_device() if device.index is None else device.index]


class RngStreams:
    """The streams of one rank. They own the device's default generator while this object lives.

    generator: its state is read and set here. Inside a CUDA graph another object with these methods
        is in force (training/graphs.py). None: torch's.
    tp_rank: this rank's place in its TP group. Only TENSOR_PARALLEL depends on it.
    dp_rank: this rank's place among all ranks that hold different tokens.
    pp_rank: this rank's place among the ranks that hold different layers.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        seed: int,
        tp_rank: int = 0,
        dp_rank: int = 0,
        pp_rank: int = 0,
        generator: Any = None,
    ) -> None:
        self.device, self.generator = device, generator or default_generator(device)
        self.seed, self.tp_rank, self.current = seed, tp_rank, DEFAULT
        self._states: dict[str, Tensor] = {}
        # DEFAULT comes last, so that the generator is left in the state of the current stream.
        for name, rank in ((TENSOR_PARALLEL, tp_rank), (DEFAULT, 0)):
            self.generator.manual_seed(
                derive_seed("stream", seed, name, dp_rank, rank, *([pp_rank] if pp_rank else []))
            )
            self._states[name] = self.state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Gives a copy torch's own generator, from which layers draw."""
        self.__dict__ |= state | {"generator": default_generator(state["device"])}

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Draws from stream `name` inside the block.

        On exit the stream that was current before continues at its stored state. Raises KeyError if
        no stream has this name.
        """
        previous = self.current
        self._switch(name)
        try:
            yield
        finally:
            self._switch(previous)

    def state(self) -> Tensor:
        """Returns a copy of the current stream's state."""
        state: Tensor = self.generator.get_state()
        return state

    @contextmanager
    def drawn_from(self, state: Tensor) -> Iterator[None]:
        """Repeats the draws that followed `state` inside the block. No stream advances."""
        before = self.state()
        self.generator.set_state(state)
        try:
            yield
        finally:
            self.generator.set_state(before)

    def snapshot(self) -> RngSnapshot:
        """Returns the states of all streams. Later draws do not change the snapshot."""
        self._states[self.current] = self.state()
        return RngSnapshot(self.current, dict(self._states))

    def restore(self, snapshot: RngSnapshot) -> None:
        """Restores every stream and the name of the current one. The snapshot stays usable.

        Raises ValueError if the snapshot has other stream names.
        """
        if set(snapshot.states) != set(self._states):
            raise ValueError(
                f"snapshot has the streams {sorted(snapshot.states)}, this rank has "
                f"{sorted(self._states)}"
            )
        self._states = dict(snapshot.states)
        self.current = snapshot.current
        self.generator.set_state(self._states[self.current])

    def _switch(self, name: str) -> None:
        if name == self.current:
            return
        state = self._states[name]
        self._states[self.current] = self.state()
        self.generator.set_state(state)
        self.current = name
