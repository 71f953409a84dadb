"""Memory that is used again: a pool of buffers, and an arena of slots in one allocation.

Each slot holds one tensor at a time. It becomes idle when no object refers to it any more. So no
slot is lost in evaluation, by an exception, or with a graph that is dropped without a backward.

`--contiguous-saved-activations` keeps the inputs of all units in an arena:

    forward    The input of a unit is copied into a slot, and the tensor itself is freed.
    backward   The unit's replay reads the slot. The slot is idle again when the unit is done.

The purpose is less fragmentation: tensors that live long (the inputs) no longer lie between tensors
that live briefly, so the allocator's memory does not break into pieces.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from megatron_lite.parallel.torch_internals import address_of
from megatron_lite.recompute.phase import allocating_on_host
from megatron_lite.recompute.saved import MovedStorage, bytes_of, moving

ALIGNMENT = 512  # bytes, as in torch's allocator of device memory
FLAG = "--contiguous-saved-activations"


class Slot:
    """Memory in use. It becomes idle again when this object is deleted.

    memory: the bytes of the slot.
    last_use: the mark of the last copy from or to it, which must end before another copy begins
        (offload.py), or None.
    """

    __slots__ = ("_origin", "_whole", "last_use", "memory")

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


class Arena(Memory):
    """One storage, cut into slots of the given sizes.

    It does not grow. It has one slot for each unit of each micro-batch in flight. It is made for
    the most micro-batches that the run will have in flight, even if --rampup-batch-size begins with
    fewer (stores.py, training/step.py).

    Slots on the device are used in the order of the current stream, so a slot may be used again
    without waiting.

    micro_batches: the number of micro-batches that the arena has slots for.
    """

    def __init__(
        self,
        sizes: Iterable[int],
        device: torch.device,
        *,
        pinned: bool = False,
        micro_batches: int = 1,
    ) -> None:
        super().__init__()
        self.micro_batches = micro_batches
        steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        whole = torch.empty(sum(steps), dtype=torch.uint8, device=device, pin_memory=pinned)
        for memory in whole.split(steps):
            self.add(memory)
        self._num_slots, self._largest = len(steps), max(steps)

    def take(self, num_bytes: int) -> Slot:
        """Returns the smallest idle slot of at least `num_bytes`. RuntimeError if none is idle."""
        fitting = [size for size, idle in self.idle.items() if idle and size >= num_bytes]
        if fitting:
            return Slot(self, min(fitting), num_bytes)
        if num_bytes > self._largest:
            raise RuntimeError(
                f"{FLAG}: the input of a unit has {num_bytes} bytes, and the slots were sized by "
                f"the first one, for {self._largest}: leave the flag out where shapes change"
            )
        raise RuntimeError(
            f"{FLAG}: all {self._num_slots} slots are in use, one for each unit of the "
            "micro-batches that may be in flight. A forward began before the backward of another, "
            "whose graph is still alive: run that backward or drop its loss first, or leave the "
            "flag out"
        )


def keeping_in(arena: Arena, *, kind: str, stay: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Copies tensors that are saved inside the block into slots of the arena.

    saved.py lists which tensors are not moved, besides `stay`.
    """

    def move(tensor: Tensor) -> MovedStorage:
        slot = arena.take(tensor.untyped_storage().nbytes())
        slot.memory.copy_(bytes_of(tensor))
        return lambda: slot.memory

    return moving(move, kind=kind, stay=stay)
