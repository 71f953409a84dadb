"""Memory for one tensor at a time, used again and again: a pool of buffers. arena.py cuts one buffer into slots instead.

A slot goes back when nobody refers to it any more, so that none is lost: not in evaluation, not by an exception, not with a graph
that is dropped without a backward.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Memory(Protocol):
    """Where slots come from."""

    bytes_in_use: int

    def take(self, num_bytes: int) -> Slot:
        """A slot of that size."""

    def storages(self) -> set[int]:
        """Addresses of its storages, in use or not."""

    def take_back(self, piece: Piece) -> None:
        """That of a slot which nobody needs any more."""


class Piece(NamedTuple):
    """memory: a tensor of bytes. last_use: what has to be over before others write to it."""

    memory: Tensor
    last_use: Any = None


class Slot:
    """Memory in use. It goes back when this object dies."""

    __slots__ = ("_origin", "_whole", "last_use", "memory")

    def __init__(self, origin: Memory, piece: Piece, num_bytes: int) -> None:
        self._origin, self._whole = origin, piece.memory
        self.memory, self.last_use = piece.memory[:num_bytes], piece.last_use
        origin.bytes_in_use += num_bytes

    def __del__(self) -> None:
        self._origin.bytes_in_use -= self.memory.numel()
        self._origin.take_back(Piece(self._whole, self.last_use))


class Pool:
    """Host memory in buffers of exactly the sizes asked for: equal steps take equal buffers, so the second allocates none.

    Where sizes change, idle buffers make room for new ones: there are never more bytes than were in use at one time. pinned: the
    device can copy from and to it by itself. torch rounds the memory under a pinned buffer up to a power of 2.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.bytes_in_use = 0
        self._pinned = pinned
        self._most_in_use = 0
        self._idle: defaultdict[int, list[Piece]] = defaultdict(list)
        self._buffers: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def take(self, num_bytes: int) -> Slot:
        """A buffer."""
        self._most_in_use = max(self._most_in_use, self.bytes_in_use + num_bytes)
        if self._idle[num_bytes]:
            return Slot(self, self._idle[num_bytes].pop(), num_bytes)
        self._make_room(num_bytes)
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        self._buffers.add(memory.untyped_storage())
        return Slot(self, Piece(memory), num_bytes)

    @property
    def num_bytes(self) -> int:
        """Of all buffers, in use or not."""
        return sum(storage.nbytes() for storage in self._buffers)

    def storages(self) -> set[int]:
        """Addresses of all buffers."""
        return {storage._cdata for storage in self._buffers}

    def _make_room(self, num_bytes: int) -> None:
        excess = self.num_bytes + num_bytes - self._most_in_use
        for size in list(self._idle):
            while excess > 0 and self._idle[size]:
                self._idle[size].pop()
                excess -= size
            if not self._idle[size]:
                del self._idle[size]

    def take_back(self, piece: Piece) -> None:
        """That of a slot which nobody needs any more."""
        self._idle[piece.memory.numel()].append(piece)
