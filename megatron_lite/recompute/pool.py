"""Memory that is used again: slots, and a pool of buffers on the host.

Each slot holds one tensor at a time. It becomes idle when no object refers to it any more. So no
slot is lost in evaluation, by an exception, or with a graph that is dropped without a backward.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from megatron_lite.parallel.torch_internals import address_of

from .phase import allocating_on_host

_TAKING = RLock()  # several threads may run a model


class Slot:
    """Memory in use. It becomes idle again when this object is deleted.

    memory: the bytes of the slot.
    last_use: the mark of the last copy from or to it, which must end before another copy begins
        (offload.py), or None.
    """

    def __init__(self, origin: Memory, size: int, num_bytes: int) -> None:
        self._origin = origin
        self._whole, self.last_use = origin.idle[size].pop()
        self.memory = self._whole[:num_bytes]
        origin.bytes_in_use += num_bytes

    def __del__(self) -> None:
        self._origin.bytes_in_use -= self.memory.numel()
        self._origin.add(self._whole, self.last_use)


class Memory:
    """A source of slots.

    bytes_in_use: the bytes of the tensors in the slots. The unused rest of a slot and idle slots do
        not count.
    idle: by size, the memory that no slot uses at the moment, with the mark of its last use.
    """

    def __init__(self) -> None:
        self.bytes_in_use = 0
        self.idle: defaultdict[int, list[tuple[Tensor, Any]]] = defaultdict(list)
        self._buffers: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def add(self, memory: Tensor, last_use: Any = None) -> None:
        """Makes memory idle."""
        self._buffers.add(memory.untyped_storage())
        self.idle[memory.numel()].append((memory, last_use))

    def take(self, num_bytes: int) -> Slot:
        """Returns a slot of `num_bytes`."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """The bytes of all memory, in use or not."""
        return sum(storage.nbytes() for storage in self._buffers)

    def storages(self) -> set[int]:
        """Returns the addresses of all storages, in use or not."""
        return {address_of(storage) for storage in self._buffers}


class Pool(Memory):
    """Host memory in buffers of exactly the requested sizes.

    Equal steps take equal buffers, so the second step allocates none. If sizes change, idle buffers
    are freed for new ones: the pool never has more bytes than were in use at one time.

    pinned: whether the memory is page-locked, which lets the device copy from and to it by itself.
        torch rounds the memory under a pinned buffer up to a power of 2.
    """

    def __init__(self, *, pinned: bool) -> None:
        super().__init__()
        self._pinned, self._most_in_use = pinned, 0

    def take(self, num_bytes: int) -> Slot:
        """Returns a slot with a buffer of exactly `num_bytes`, an idle one if there is any."""
        with _TAKING:
            self._most_in_use = max(self._most_in_use, self.bytes_in_use + num_bytes)
            if not self.idle[num_bytes]:
                excess = self.num_bytes + num_bytes - self._most_in_use
                for size, pieces in list(self.idle.items()):
                    while excess > 0 and pieces:
                        pieces.pop()
                        excess -= size
                    if not pieces:
                        del self.idle[size]
                with allocating_on_host():
                    self.add(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned))
            return Slot(self, num_bytes, num_bytes)
