"""How tensors travel between the stages of a pipeline: sends that nobody waits for, receives that begin before they are needed.

Tensors carry no name. What a rank sends on a lane arrives in the order in which it was sent, and pipeline/order.py gives both
ends the same order. A lane carries one direction only, so that a send never waits behind a receive.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Direction = Literal["forward", "backward"]


class Arriving(NamedTuple):
    """A tensor under way to this rank."""

    tensor: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """The tensor, ready for this device's next kernels."""
        self.work.wait()
        return self.tensor


class Links:
    """Sends and receives of one pipeline rank. shape, dtype: of the hidden states between stages, the same for all.

    lanes: groups of the pipeline's ranks: forward, backward, and both again for the way between the last rank and the first.
    """

    def __init__(self, lanes: tuple[ProcessGroup, ...], *, shape: tuple[int, ...], dtype: torch.dtype,
                 device: torch.device) -> None:
        self._lanes, self._shape, self._dtype, self._device = lanes, shape, dtype, device
        self._rank, self._size = lanes[0].rank(), lanes[0].size()
        self._leaving: list[tuple[Tensor, dist.Work]] = []

    def send(self, tensor: Tensor, direction: Direction) -> None:
        """Begins to send to the rank with the next stage (forward) or the one before (backward)."""
        step = 1 if direction == "forward" else -1
        peer = (self._rank + step) % self._size
        lane = self._lane(direction, self._rank if direction == "forward" else peer)
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, group=lane, group_dst=peer)
        assert work is not None
        self._leaving.append((tensor, work))

    def receive(self, direction: Direction) -> Arriving:
        """Begins to receive from the rank with the stage before (forward) or the next one (backward)."""
        step = -1 if direction == "forward" else 1
        peer = (self._rank + step) % self._size
        lane = self._lane(direction, peer if direction == "forward" else self._rank)
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(tensor, group=lane, group_src=peer)
        assert work is not None
        return Arriving(tensor, work)

    def forget_sent(self) -> None:
        """Lets go of tensors that have left."""
        self._leaving = [(tensor, work) for tensor, work in self._leaving if not work.is_completed()]

    def wait_sent(self) -> None:
        """Returns once everything has left (a GPU: once its stream will wait for that)."""
        for _, work in self._leaving:
            work.wait()
        self._leaving.clear()

    @property
    def leaving(self) -> list[Tensor]:
        """What is held until it has left."""
        return [tensor for tensor, _ in self._leaving]

    def _lane(self, direction: Direction, lower: int) -> ProcessGroup:
        """The lane between the ranks `lower` and `lower + 1`; behind the last rank comes the first."""
        return self._lanes[(direction == "backward") + 2 * (lower == self._size - 1)]
