"""Collectives of CPU tensors through memory that the ranks of one host share.

gloo sends between the ranks of one host through the loopback interface. Each byte is copied into
the kernel and out of it, and a reduce-scatter is an all-reduce of a copy. Here every rank owns a
region of SLOTS slots, which the others map read-only. A collective runs in chunks:

    publish    copy this rank's chunk into its next slot, and tell every other rank
    collect    wait until the ranks that are read have published the chunk, then read their slots

A rank tells another one by a message of eight bytes, over a Unix socket between each two ranks. The
kernel orders the memory accesses on both sides of a message. A rank that waits sleeps in `recv`.
The socket of a rank that dies is closed, so that the others fail at once. A message also has the
number of chunks that its sender has collected: a slot is written again only when every rank has
read it.

Sums have the bits of gloo's (see gloo_order.py). shared_memory_setup.py opens a channel;
collectives.py decides when one is used.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import deque
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.config.parallel import SHARED_REGION_BYTES
from megatron_lite.parallel.shared_transfers import (
    COMBINES,
    DTYPES,
    AllGather,
    AllReduce,
    Broadcast,
    ReduceScatter,
    Transfer,
)
from megatron_lite.parallel.waiting import WAITING

SLOTS = 8
SLOT_BYTES = SHARED_REGION_BYTES // SLOTS
# A rank tries this long before it sleeps. To be woken takes tens of microseconds on a virtual
# machine. It gives its core away between two tries, so that another rank may run there.
SPIN_S = 100e-6
MESSAGE = struct.Struct("<II")  # chunks that the sender has collected; what it has published, or 0
COUNTS = 2**32  # counts are sent modulo this number


class Pending(NamedTuple):
    """A collective of a channel under way."""

    channel: Channel
    transfer: Transfer

    def wait(self) -> None:
        """Completes the collective, and those that were started before it."""
        self.channel.finish(self.transfer)


class Channel:
    """This rank's end of the shared memory of a group. Only one thread may use it at a time.

    rank, size: this rank's place in the group, and the size of the group.
    timeout: limit in seconds for one wait for another rank.
    regions: the region of every rank in rank order, uint8 [SHARED_REGION_BYTES]. This rank's region
        is writable.
    sockets: the sockets to every rank, in rank order; None is this rank.
    """

    def __init__(
        self,
        rank: int,
        regions: Sequence[Tensor],
        sockets: Sequence[socket.socket | None],
        *,
        timeout: float,
    ) -> None:
        self.rank, self.size, self.timeout = rank, len(regions), timeout
        self._slots = [  # by slot, then by rank
            [region[i * SLOT_BYTES : (i + 1) * SLOT_BYTES] for region in regions]
            for i in range(SLOTS)
        ]
        self._sockets = {other: one for other, one in enumerate(sockets) if one is not None}
        self._published = self._collected = self._told = 0
        self._heard = dict.fromkeys(self._sockets, 0)  # the chunks that the others have published
        self._signatures = {other: deque[int]() for other in self._sockets}  # of those not read yet
        self._read = dict.fromkeys(self._sockets, 0)  # the chunks that the others have collected
        self._pending: deque[Transfer] = deque()

    def all_reduce(self, result: Tensor, operand: Tensor, op: str) -> Pending:
        """Begins to fill contiguous `result` with the reduction of `operand`, which it may be."""
        return self._begin(
            AllReduce(result, operand, op, rank=self.rank, size=self.size, slot_bytes=SLOT_BYTES)
        )

    def reduce_scatter(self, own: Tensor, operand: Tensor) -> Pending:
        """Begins to fill `own` [n] with this rank's part of the sum of `operand` [n * size].

        Both are contiguous, and `own` may be this rank's part of `operand`.
        """
        return self._begin(
            ReduceScatter(own, operand, rank=self.rank, size=self.size, slot_bytes=SLOT_BYTES)
        )

    def all_gather(self, gathered: Tensor, own: Tensor) -> Pending:
        """Begins to fill `gathered` [n * size] with every rank's `own` [n], in rank order.

        Both are contiguous, and `own` may be this rank's part of `gathered`.
        """
        return self._begin(
            AllGather(gathered, own, rank=self.rank, size=self.size, slot_bytes=SLOT_BYTES)
        )

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        """Begins to overwrite contiguous `tensor` with that of rank `source` of the group."""
        return self._begin(Broadcast(tensor, rank=self.rank, source=source, slot_bytes=SLOT_BYTES))

    def _begin(self, transfer: Transfer) -> Pending:
        self.start(transfer)
        return Pending(self, transfer)

    def start(self, transfer: Transfer) -> None:
        """Publishes as many chunks of a transfer as fit.

        It does not wait for other ranks, unless chunks of the transfers before fill the slots: it
        completes those transfers first. All ranks must start the same transfers in the same order.
        """
        # A chunk is known by its count, so a transfer's chunks are published before the next one's.
        while self._pending and self._pending[-1].published < self._pending[-1].chunks:
            self.finish(self._pending[0])
        self._pending.append(transfer)
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            self._publish(transfer)

    def finish(self, transfer: Transfer) -> None:
        """Completes a transfer, and those that were started before it.

        Raises RuntimeError if a rank has ended, does not publish within the timeout, or is in
        another collective.
        """
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            while transfer.collected < transfer.chunks:
                first = self._pending[0]
                self._step(first)
                if first.collected == first.chunks:
                    self._pending.popleft()

    def close(self) -> None:
        """Closes the sockets. The memory is freed when no rank maps it any more."""
        for one in self._sockets.values():
            one.close()
        self._sockets.clear()
        self._slots.clear()

    def _step(self, transfer: Transfer) -> None:
        """Collects the next chunk of the first transfer, and publishes a further one."""
        chunk = transfer.collected
        # The other ranks wait for this rank's part of the chunk, as it waits for theirs.
        while transfer.published == chunk:
            self._await_slot()
            self._publish(transfer)
        for other in transfer.sources:
            if other != self.rank:
                self._await_chunk(other)
                self._check_signature(other, transfer)
        transfer.collect(chunk, self._slots[self._collected % SLOTS])
        transfer.collected += 1
        self._collected += 1
        if transfer.published < transfer.chunks:
            self._publish(transfer)
            # The message of a published chunk also says what was collected. Without such a message
            # the other ranks could not write to the slots that this rank has read.
            if self._told < self._collected:
                self._tell(0)

    def _publish(self, transfer: Transfer) -> None:
        while transfer.published < transfer.chunks and self._has_slot():
            slot = self._slots[self._published % SLOTS][self.rank]
            transfer.publish(transfer.published, slot)
            transfer.published += 1
            self._published += 1
            self._tell(transfer.signature)

    def _has_slot(self) -> bool:
        least = self._published - SLOTS
        return self._collected > least and all(read > least for read in self._read.values())

    def _await_slot(self) -> None:
        """Waits until every rank has read the next slot.

        A rank that waits here may wait for one that waits here too, so each first tells what it has
        read.
        """
        if self._told < self._collected:
            self._tell(0)
        for other in self._sockets:
            while self._read[other] <= self._published - SLOTS:
                self._hear(other)

    def _await_chunk(self, other: int) -> None:
        while self._heard[other] <= self._collected:
            self._hear(other)

    def _check_signature(self, other: int, transfer: Transfer) -> None:
        signatures = self._signatures[other]
        # The chunks of transfers that did not read this rank are still in the queue.
        while len(signatures) > self._heard[other] - self._collected:
            signatures.popleft()
        if signatures[0] != transfer.signature:
            raise RuntimeError(
                f"rank {self.rank} of a group of {self.size} is in the collective {transfer}, and "
                f"rank {other} of the group is in another one: every rank must issue the same "
                "collectives in the same order"
            )

    def _tell(self, signature: int) -> None:
        message = MESSAGE.pack(self._collected % COUNTS, signature)
        for one in self._sockets.values():
            # A rank whose part was done may have ended in good order. If this rank still needs a
            # message of it, the wait for that message fails.
            with suppress(BrokenPipeError, ConnectionResetError):
                one.send(message, socket.MSG_NOSIGNAL)
        self._told = self._collected

    def _hear(self, other: int) -> None:
        """Waits for one message of a rank."""
        with WAITING:
            data = self._receive(other)
        if len(data) != MESSAGE.size:
            raise self._lost(other, "end of file")
        collected, signature = MESSAGE.unpack(data)
        # The count arrives modulo COUNTS; the difference to the known one is far smaller.
        self._read[other] += (collected - self._read[other]) % COUNTS
        if signature:
            self._heard[other] += 1
            self._signatures[other].append(signature)

    def _receive(self, other: int) -> bytes:
        one = self._sockets[other]
        stop: float | None = None
        try:
            while True:
                try:
                    return one.recv(MESSAGE.size, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    now = time.perf_counter()
                stop = now + SPIN_S if stop is None else stop
                if now > stop:
                    break
                os.sched_yield()
            one.settimeout(self.timeout)
            try:
                return one.recv(MESSAGE.size)
            finally:
                # With a timeout Python sleeps before every call, also one with MSG_DONTWAIT.
                one.settimeout(None)
        except TimeoutError as error:
            raise RuntimeError(
                f"a collective through shared memory timed out after {self.timeout:g} s: rank "
                f"{other} of a group of {self.size} has not reached it"
            ) from error
        except OSError as error:
            raise self._lost(other, error) from error

    def _lost(self, other: int, reason: Any) -> RuntimeError:
        # supervision/watch.py recognises "closed by peer".
        return RuntimeError(
            f"connection closed by peer: rank {other} of a group of {self.size} that shares memory "
            f"({reason})"
        )


# The channels of this process's groups: a ProcessGroup takes no attribute.
CHANNELS: MutableMapping[ProcessGroup, Channel] = WeakKeyDictionary()


def channel_of(group: ProcessGroup, tensor: Tensor, op: str = "SUM") -> Channel | None:
    """Returns the channel that carries collectives of `tensor` in this group, or None for gloo.

    The answer is the same on all ranks that call a collective with equal arguments.
    """
    channel = CHANNELS.get(group)
    if (
        channel is None
        or tensor.device.type != "cpu"
        or tensor.dtype not in DTYPES
        or op not in COMBINES
        or torch.compiler.is_compiling()
    ):
        return None
    return channel
