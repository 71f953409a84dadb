"""Random-number generators whose states a replay restores. Those of this library: rng.py."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class RngSnapshot(NamedTuple):
    """The state of every stream, and the name of the stream that was current.

    The state tensors are shared between snapshots and must not be modified.
    """

    current: str
    states: dict[str, Tensor]


class Generators(Protocol):
    """All the generators that a replay may draw from. Their state can be read and restored."""

    device: torch.device

    def snapshot(self) -> RngSnapshot: ...

    def restore(self, snapshot: RngSnapshot) -> None: ...
