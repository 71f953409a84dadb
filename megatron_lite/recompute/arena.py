"""One allocation for the kept inputs of all units, cut into slots: `--contiguous-saved-activations`.

    forward    the input of a unit is copied into a slot, and the tensor itself is freed
    backward   reads the slot, and gives it back when the unit is done

What lives long does not lie between what lives short then, so the allocator's memory does not break into pieces. There are as
many slots as units in the micro-batches in flight, and never more: an arena does not grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from megatron_lite.recompute.pool import Piece, Slot
from megatron_lite.recompute.saved import bytes_of, moving

ALIGNMENT = 512  # as torch's allocator of device memory
FLAG = "--contiguous-saved-activations"


class Arena:
    """Slots of the given sizes in one storage. On the device, its slots are used in the order of the current stream.

    bytes_in_use: of the tensors in it; what is left of their slots, and other slots, do not count.
    """

    def __init__(self, sizes: Iterable[int], device: torch.device, *, pinned: bool = False) -> None:
        self.bytes_in_use = 0
        steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sorted(sizes)]
        self._memory = torch.empty(sum(steps), dtype=torch.uint8, device=device, pin_memory=pinned)
        self._idle = [Piece(memory) for memory in self._memory.split(steps)]  # the smallest first
        self._num_slots, self._largest = len(steps), max(steps)

    def take(self, num_bytes: int) -> Slot:
        """The smallest idle slot of at least that size. RuntimeError where there is none."""
        place = next((place for place, piece in enumerate(self._idle) if piece.memory.numel() >= num_bytes), None)
        if place is not None:
            return Slot(self, self._idle.pop(place), num_bytes)
        if num_bytes > self._largest:
            raise RuntimeError(f"{FLAG}: the input of a unit has {num_bytes} bytes, and the slots were sized by the first one, "
                               f"for {self._largest}: leave the flag out where shapes change")
        raise RuntimeError(f"{FLAG}: all {self._num_slots} slots are in use, one for each unit of the micro-batches that may be "
                           "in flight. A forward began before the backward of another, whose graph is still alive: run that "
                           "backward or drop its loss first, or leave the flag out")

    def storages(self) -> set[int]:
        """The address of its storage."""
        return {self._memory.untyped_storage()._cdata}

    def take_back(self, piece: Piece) -> None:
        """That of a slot which nobody needs any more."""
        self._idle.append(piece)
        self._idle.sort(key=lambda piece: piece.memory.numel())


def keeping_in(arena: Arena, *, kind: str, stay: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Inside, what is saved is kept in the arena. See saved.py for what is not moved."""
    def move(tensor: Tensor) -> _InSlot:
        storage = tensor.untyped_storage()
        slot = arena.take(storage.nbytes())
        slot.memory.copy_(bytes_of(storage))
        return _InSlot(slot)

    return moving(move, kind=kind, stay=stay)


class _InSlot:
    """A copy in a slot."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def memory(self) -> Tensor:
        return self._slot.memory
