"""Sends and receives between the stages of a pipeline.

Computation never waits for a send, and a receive begins before its tensor is needed. Messages carry
no name. The tensors of one process group arrive in the order in which they were sent, and
pipeline/order.py gives both ends the same order. A group carries one direction only, so a send
never waits behind a receive.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import Started
from megatron_lite.parallel.timing import WAITING

Direction = Literal["forward", "backward"]


class _Sending(NamedTuple):
    """A tensor on its way to another rank.

    waited: on a CPU, a thread's wait for `work`. A gloo work does not report its completion until a
        thread waits for it. None on a GPU.
    """

    tensor: Tensor
    work: dist.Work
    waited: Future[Any] | None

    def is_done(self) -> bool:
        return self.work.is_completed() if self.waited is None else self.waited.done()

    def wait(self) -> None:
        if self.waited is None:
            self.work.wait()
        else:
            self.waited.result()  # raises what waiting raised


class Links:
    """The sends and receives of one pipeline rank.

    groups: groups of the pipeline's ranks. The first two carry forward and backward tensors; the
        next two carry them between the last rank and the first.
    shape, dtype: the hidden states between stages, the same for all stages.
    """

    def __init__(
        self,
        groups: tuple[ProcessGroup, ...],
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._groups, self._shape, self._dtype, self._device = groups, shape, dtype, device
        self._rank, self._size = groups[0].rank(), groups[0].size()
        self._leaving: list[_Sending] = []
        self._is_simulated = dist.get_backend(groups[0]) == dist.Backend.FAKE
        # One thread can wait for all sends of a group, since they complete in order.
        has_waiters = device.type == "cpu" and not self._is_simulated
        self._waiters = [ThreadPoolExecutor(1, "sent") for _ in groups] if has_waiters else []

    def send(self, tensor: Tensor, direction: Direction) -> None:
        """Begins to send to the rank of the next stage (forward) or the stage before (backward)."""
        number, peer = self._route(direction, 1 if direction == "forward" else -1)
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, group=self._groups[number], group_dst=peer)
        assert work is not None
        waited: Future[Any] | None = None
        if self._waiters:
            waited = self._waiters[number].submit(work.wait)
        elif self._is_simulated:  # its wait returns at once, but it never reports completion
            waited = Future()
            waited.set_result(work.wait())
        self._leaving.append(_Sending(tensor, work, waited))

    def receive(self, direction: Direction) -> Started:
        """Begins to receive from the rank of the stage before (forward) or the next (backward)."""
        number, peer = self._route(direction, -1 if direction == "forward" else 1)
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(tensor, group=self._groups[number], group_src=peer)
        assert work is not None
        return Started(tensor, (work,))

    def forget_sent(self) -> None:
        """Drops the references to tensors that have been sent. Does not wait for the others."""
        staying = []
        for one in self._leaving:
            if one.is_done():
                one.wait()  # returns at once, and raises the send's error if it failed
            else:
                staying.append(one)
        self._leaving = staying

    def wait_sent(self) -> None:
        """Returns once all tensors have been sent.

        On a GPU it returns once the current stream is set to wait for the sends.
        """
        with WAITING:
            for one in self._leaving:
                one.wait()
        self._leaving.clear()

    @property
    def leaving(self) -> list[Tensor]:
        """The tensors that are held until they have been sent."""
        return [one.tensor for one in self._leaving]

    def _route(self, direction: Direction, step: int) -> tuple[int, int]:
        """Returns the number of the group that joins this rank and the one `step` away, and that
        rank. Rank 0 follows the last rank."""
        peer = (self._rank + step) % self._size
        closes_the_ring = (self._rank if step == 1 else peer) == self._size - 1
        return (direction == "backward") + 2 * closes_the_ring, peer
