"""One allocation for the kept inputs of all units, cut into slots:
`--contiguous-saved-activations`.

    forward    The input of a unit is copied into a slot, and the tensor itself is freed.
    backward   The unit's replay reads the slot. The slot is idle again when the unit is done.

The purpose is less fragmentation: tensors that live long (the inputs) no longer lie between tensors
that live briefly, so the allocator's memory does not break into pieces.

An arena does not grow. It has one slot for each unit of each micro-batch in flight. It is made for
the most micro-batches that the run will have in flight, even if --rampup-batch-size begins with
fewer (stores.py, training/step.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from megatron_lite.parallel.torch_internals import address_of
from megatron_lite.recompute.pool import PooledMemory, Slot
from megatron_lite.recompute.saved import bytes_of, moving

ALIGNMENT = 512  # bytes, as in torch's allocator of device memory
FLAG = "--contiguous-saved-activations"


class Arena:
    """One storage, cut into slots of the given sizes.

    Slots on the device are used in the order of the current stream, so a slot may be used again
    without waiting.

    bytes_in_use: the bytes of the tensors in the slots. The unused rest of a slot and idle slots do
        not count.
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
        self.bytes_in_use, self.micro_batches = 0, micro_batches
        steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sorted(sizes)]
        self._memory = torch.empty(sum(steps), dtype=torch.uint8, device=device, pin_memory=pinned)
        # the smallest first
        self._idle = [PooledMemory(memory) for memory in self._memory.split(steps)]
        self._num_slots, self._largest = len(steps), max(steps)

    def take(self, num_bytes: int) -> Slot:
        """Returns the smallest idle slot of at least `num_bytes`. RuntimeError if none is idle."""
        place = next(
            (place for place, piece in enumerate(self._idle) if piece.memory.numel() >= num_bytes),
            None,
        )
        if place is not None:
            return Slot(self, self._idle.pop(place), num_bytes)
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

    @property
    def num_bytes(self) -> int:
        """The bytes of all slots, in use or not."""
        return self._memory.numel()

    def storages(self) -> set[int]:
        """Returns the address of the arena's storage."""
        return {address_of(self._memory.untyped_storage())}

    def take_back(self, piece: PooledMemory) -> None:
        """Makes the memory of a slot idle again, when no object refers to the slot any more."""
        # `take` returns the first slot that is large enough, so the smallest must come first.
        self._idle.append(piece)
        self._idle.sort(key=lambda piece: piece.memory.numel())


def keeping_in(arena: Arena, *, kind: str, stay: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Copies tensors that are saved inside the block into slots of the arena.

    saved.py lists which tensors are not moved, besides `stay`.
    """

    def move(tensor: Tensor) -> _InSlot:
        slot = arena.take(tensor.untyped_storage().nbytes())
        slot.memory.copy_(bytes_of(tensor))
        return _InSlot(slot)

    return moving(move, kind=kind, stay=stay)


class _InSlot:
    """The copy of a storage in a slot of the arena."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def memory(self) -> Tensor:
        return self._slot.memory
