"""A pool of buffers that are used again: each buffer holds one tensor at a time.

arena.py is the other source of such memory; it cuts one buffer into slots.

A slot becomes idle when no object refers to it any more. So no slot is lost in evaluation, by an
exception, or with a graph that is dropped without a backward.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_lite.parallel.torch_internals import address_of
from megatron_lite.recompute.phase import allocating_on_host


class Memory(Protocol):
    """A source of slots: a pool, or an arena."""

    bytes_in_use: int

    def take(self, num_bytes: int) -> Slot:
        """Returns a slot of `num_bytes`."""

    def storages(self) -> set[int]:
        """Returns the addresses of its storages, in use or not."""

    def take_back(self, piece: PooledMemory) -> None:
        """Makes the memory of a slot idle again, when no object refers to the slot any more."""


class PooledMemory(NamedTuple):
    """Memory that no slot uses at the moment.

    memory: a tensor of bytes.
    last_use: the mark of the last copy from or to it, which must end before another copy begins.
    """

    memory: Tensor
    last_use: Any = None


class Slot:
    """Memory in use. It becomes idle again when this object is deleted.

    memory: the bytes of the slot.
    last_use: the mark of the last copy from or to it (offload.py), or None.
    """

    __slots__ = ("_origin", "_whole", "last_use", "memory")

    def __init__(self, origin: Memory, piece: PooledMemory, num_bytes: int) -> None:
        self._origin, self._whole = origin, piece.memory
        self.memory, self.last_use = piece.memory[:num_bytes], piece.last_use
        origin.bytes_in_use += num_bytes

    def __del__(self) -> None:
        self._origin.bytes_in_use -= self.memory.numel()
        self._origin.take_back(PooledMemory(self._whole, self.last_use))


class Pool:
    """Host memory in buffers of exactly the requested sizes.

    Equal steps take equal buffers, so the second step allocates none. If sizes change, idle buffers
    are freed for new ones: the pool never has more bytes than were in use at one time.

    pinned: whether the memory is page-locked, which lets the device copy from and to it by itself.
        torch rounds the memory under a pinned buffer up to a power of 2.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.bytes_in_use = 0
        self._pinned = pinned
        self._most_in_use = 0
        self._idle: defaultdict[int, list[PooledMemory]] = defaultdict(list)
        self._buffers: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def take(self, num_bytes: int) -> Slot:
        """Returns a slot with a buffer of exactly `num_bytes`, an idle one if there is any."""
        self._most_in_use = max(self._most_in_use, self.bytes_in_use + num_bytes)
        if self._idle[num_bytes]:
            return Slot(self, self._idle[num_bytes].pop(), num_bytes)
        self._make_room(num_bytes)
        with allocating_on_host():
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        self._buffers.add(memory.untyped_storage())
        return Slot(self, PooledMemory(memory), num_bytes)

    @property
    def num_bytes(self) -> int:
        """The bytes of all buffers, in use or not."""
        return sum(storage.nbytes() for storage in self._buffers)

    def storages(self) -> set[int]:
        """Returns the addresses of all buffers, in use or not."""
        return {address_of(storage) for storage in self._buffers}

    def _make_room(self, num_bytes: int) -> None:
        """Frees idle buffers for a new one of `num_bytes`.

        The new buffer must not raise the total above the most bytes that were in use at one time.
        """
        excess = self.num_bytes + num_bytes - self._most_in_use
        for size in list(self._idle):
            while excess > 0 and self._idle[size]:
                self._idle[size].pop()
                excess -= size
            if not self._idle[size]:
                del self._idle[size]

    def take_back(self, piece: PooledMemory) -> None:
        """Makes the memory of a slot idle again, when no object refers to the slot any more."""
        self._idle[piece.memory.numel()].append(piece)
