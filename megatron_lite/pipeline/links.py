"""How tensors travel between the stages of a pipeline: sends that nobody waits for, receives that begin before they are needed.

Tensors carry no name. What a rank sends on a lane arrives in the order in which it was sent, and pipeline/order.py gives both
ends the same order. A lane carries one direction only, so that a send never waits behind a receive.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
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


class _Leaving(NamedTuple):
    """A tensor on its way. waited: on a CPU, where gloo's works do not know that they are done until a thread waits for them."""

    tensor: Tensor
    work: dist.Work
    waited: Future[object] | None

    def is_done(self) -> bool:
        return self.work.is_completed() if self.waited is None else self.waited.done()

    def wait(self) -> None:
        if self.waited is None:
            self.work.wait()
        else:
            self.waited.result()  # raises what waiting raised


class Links:
    """Sends and receives of one pipeline rank. shape, dtype: of the hidden states between stages, the same for all.

    lanes: groups of the pipeline's ranks: forward, backward, and both again for the way between the last rank and the first.
    waited_s: how long `wait_sent` has taken so far.
    """

    def __init__(self, lanes: tuple[ProcessGroup, ...], *, shape: tuple[int, ...], dtype: torch.dtype,
                 device: torch.device) -> None:
        self._lanes, self._shape, self._dtype, self._device = lanes, shape, dtype, device
        self._rank, self._size = lanes[0].rank(), lanes[0].size()
        self._leaving: list[_Leaving] = []
        self.waited_s = 0.0
        # One for each lane: what leaves on a lane arrives in order.
        self._waiters = tuple(ThreadPoolExecutor(1, "sent") for _ in lanes) if device.type == "cpu" else ()

    def send(self, tensor: Tensor, direction: Direction) -> None:
        """Begins to send to the rank with the next stage (forward) or the one before (backward)."""
        step = 1 if direction == "forward" else -1
        peer = (self._rank + step) % self._size
        lane = self._lane(direction, self._rank if direction == "forward" else peer)
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, group=self._lanes[lane], group_dst=peer)
        assert work is not None
        self._leaving.append(_Leaving(tensor, work, self._waiters[lane].submit(work.wait) if self._waiters else None))

    def receive(self, direction: Direction) -> Arriving:
        """Begins to receive from the rank with the stage before (forward) or the next one (backward)."""
        step = -1 if direction == "forward" else 1
        peer = (self._rank + step) % self._size
        lane = self._lane(direction, peer if direction == "forward" else self._rank)
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(tensor, group=self._lanes[lane], group_src=peer)
        assert work is not None
        return Arriving(tensor, work)

    def forget_sent(self) -> None:
        """Lets go of tensors that have left. Does not wait."""
        staying = []
        for one in self._leaving:
            if one.is_done():
                one.wait()
            else:
                staying.append(one)
        self._leaving = staying

    def wait_sent(self) -> None:
        """Returns once everything has left (a GPU: once its stream will wait for that)."""
        start = time.perf_counter()
        for one in self._leaving:
            one.wait()
        self._leaving.clear()
        self.waited_s += time.perf_counter() - start

    @property
    def leaving(self) -> list[Tensor]:
        """What is held until it has left."""
        return [one.tensor for one in self._leaving]

    def _lane(self, direction: Direction, lower: int) -> int:
        """Which lane goes between the ranks `lower` and `lower + 1`; behind the last rank comes the first."""
        return (direction == "backward") + 2 * (lower == self._size - 1)
