"""The memory for the kept tensors of one stage: host memory, an arena on the device, or both.

`--contiguous-saved-activations` keeps the inputs of all units in an arena:

    forward    The input of a unit is copied into a slot, and the tensor itself is freed.
    backward   The unit's replay reads the slot. The slot is idle again when the unit is done.

The purpose is less fragmentation: tensors that live long (the inputs) no longer lie between tensors
that live briefly, so the allocator's memory does not break into pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.parallel.torch_internals import tree_leaves
from megatron_lite.parallel.weights import weights_in_use

from .offload import CopyStreams, Offload, copy_streams_of
from .phase import allocating_on_host, running_modules
from .pool import Memory, Pool, Slot
from .recompute_plan import RecomputePlan, Segment
from .saved import MovedStorage, bytes_of, moving

ALIGNMENT = 512  # bytes, as in torch's allocator of device memory
FLAG = "--contiguous-saved-activations"

Opened = Callable[[Segment, Iterable[Any]], AbstractContextManager[None]]


class Arena(Memory):
    """One storage, cut into slots of the given sizes.

    It does not grow. It has one slot for each unit of each micro-batch in flight. It is made for
    the most micro-batches that the run will have in flight, even if --rampup-batch-size begins with
    fewer (training/step.py).

    Slots on the device are used in the order of the current stream, so a slot may be used again
    without waiting.
    """

    def __init__(self, sizes: Iterable[int], device: torch.device, *, pinned: bool) -> None:
        super().__init__()
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


def _moved(arena: Memory, tensor: Tensor) -> MovedStorage:
    """Copies a tensor into a slot of the arena."""
    slot = arena.take(tensor.untyped_storage().nbytes())
    slot.memory.copy_(bytes_of(tensor))
    return lambda: slot.memory


class Stores:
    """The memory that the layers of a stage use again in every forward.

    Nothing is allocated before the first forward.

    micro_batches: how many micro-batches may be in flight: forwards before the backward of the
        first one. An arena has slots for that many.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.micro_batches = device, 1
        self.pool = Pool(pinned=device.type == "cuda")
        # By whether it is on the host; and for how many micro-batches it has slots.
        self._arenas = {on_host: Memory() for on_host in (False, True)}
        self._room = Counter[bool]()

    def __deepcopy__(self, memo: dict[int, Any]) -> Stores:
        return Stores(self.device)

    def reserve(self, micro_batches: int) -> None:
        """Makes room for `micro_batches` in flight from the next forward on. Room never shrinks.

        A forward replaces an arena that is too small, if none of its slots is in use. That is
        always the case between steps.
        """
        self.micro_batches = max(self.micro_batches, micro_batches)

    @contextmanager
    def forward(self, plan: RecomputePlan, hidden_states: Tensor, tp_size: int) -> Iterator[Opened]:
        """Prepares the memory for one forward of a plan that uses it (`uses_stores`), with
        gradients. Call it around all segments of the plan.

        It yields a function `opened(segment, shared)`, whose result goes around each segment.
        `shared` lists objects whose tensors are not moved: the segment's layers with their
        parameters, and the further arguments of the layers.
        """
        offload = Offload(self.copy_streams, kind=self.device.type)

        def opened(segment: Segment, shared: Iterable[Any]) -> AbstractContextManager[None]:
            memory: Memory = self.pool
            if in_arena := plan.contiguous and segment.unit:
                memory = self._arena(plan, hidden_states, tp_size, segment.on_host)
            if segment.host_modules:
                return _parts(offload, memory, segment.host_modules, shared)
            if segment.on_host:
                return offload.segment(memory, stay=_tensors(shared))
            if not in_arena:
                return nullcontext()
            return moving(partial(_moved, memory), kind=self.device.type, stay=_tensors(shared))

        try:
            yield opened
        finally:
            offload.finish()

    @property
    def device_bytes(self) -> int:
        """The bytes of all tensors that are in slots of the arena on the device now."""
        return self._arenas[False].bytes_in_use

    @property
    def host_bytes(self) -> int:
        """The bytes of all tensors that are in host memory now."""
        return self.pool.bytes_in_use + self._arenas[True].bytes_in_use

    @property
    def allocated_bytes(self) -> int:
        """The bytes of all storages, in use or not."""
        return self.pool.num_bytes + sum(arena.num_bytes for arena in self._arenas.values())

    def storages(self) -> set[int]:
        """Returns the addresses of all storages, in use or not."""
        return self.pool.storages().union(*(arena.storages() for arena in self._arenas.values()))

    @cached_property
    def copy_streams(self) -> CopyStreams:
        """The object that copies between device and host."""
        return copy_streams_of(self.device)

    def _arena(
        self, plan: RecomputePlan, hidden_states: Tensor, tp_size: int, on_host: bool
    ) -> Memory:
        """Returns the arena for units that keep their input on the host, or for the other units.

        The input of the first forward gives the sizes of the slots: [s/t or s, b, h] for a whole
        input, 1/t of it for a split input.
        """
        if self._room[on_host] < self.micro_batches and not self._arenas[on_host].bytes_in_use:
            # frees the memory of the smaller arena before the larger one is allocated
            self._arenas[on_host], self._room[on_host] = Memory(), self.micro_batches
            whole = hidden_states.untyped_storage().nbytes()
            sizes = [
                whole // tp_size if segment.split else whole
                for segment in plan.segments
                if segment.unit and segment.on_host == on_host
            ]
            device = torch.device("cpu") if on_host else self.device
            with allocating_on_host() if on_host else nullcontext():
                self._arenas[on_host] = Arena(
                    sizes * self.micro_batches,
                    device,
                    pinned=on_host and self.device.type == "cuda",
                )
        return self._arenas[on_host]


@contextmanager
def _parts(
    offload: Offload, memory: Memory, modules: frozenset[str], shared: Iterable[Any]
) -> Iterator[None]:
    """Offloads what these modules of the segment's layer save first. Such a segment has one layer.

    The hooks that tell which module runs are registered for the block alone.
    """
    (layer,), *_ = shared
    with running_modules(layer) as running:

        def wanted() -> bool:
            # Only the innermost running module counts: the parts name modules, not their children.
            return bool(running) and running[-1] in modules

        with offload.segment(memory, stay=_tensors(shared), wanted=wanted):
            yield


def _tensors(shared: Iterable[Any]) -> Iterator[Tensor]:
    for value in tree_leaves(shared):
        if isinstance(value, nn.Module):
            yield from weights_in_use(value)
        elif isinstance(value, Tensor):
            yield value
