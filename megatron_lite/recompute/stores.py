"""Where the layers of one stage put what they keep for backward, if not simply on the device: host memory, an arena, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_lite.parallel.weights import weights_in_use
from megatron_lite.recompute.arena import Arena, keeping_in
from megatron_lite.recompute.offload import CudaLanes, Lanes, Offload
from megatron_lite.recompute.plan import RecomputePlan, Segment
from megatron_lite.recompute.pool import Pool

Opened = Callable[[Segment, Iterable[Any]], AbstractContextManager[None]]


class Stores:
    """The memory that a model's layers use again in every forward. Nothing is allocated before the first.

    micro_batches: whose forwards may run before the first one's backward, of which the arenas' sizes follow.
    """

    def __init__(self, device: torch.device, *, micro_batches: int = 1) -> None:
        self.device, self.micro_batches = device, micro_batches
        self.pool = Pool(pinned=device.type == "cuda")
        self._arenas: dict[bool, Arena] = {}  # by whether it is on the host

    def __deepcopy__(self, memo: dict[int, Any]) -> Stores:
        return Stores(self.device, micro_batches=self.micro_batches)

    @contextmanager
    def forward(self, plan: RecomputePlan, hidden_states: Tensor, tp_size: int) -> Iterator[Opened]:
        """Around all segments. What it gives is called around each, with the segment and what it shares with others: its layers,
        whose parameters are not moved, and what they get, in which no tensor is moved."""
        if not torch.is_grad_enabled() or not (plan.contiguous or any(segment.on_host for segment in plan.segments)):
            yield lambda segment, shared: nullcontext()
            return
        offload = Offload(self.lanes, kind=self.device.type)

        def opened(segment: Segment, shared: Iterable[Any]) -> AbstractContextManager[None]:
            arena = self._arena(plan, hidden_states, tp_size, segment.on_host) if plan.contiguous and segment.unit else None
            if segment.on_host:
                return offload.segment(arena or self.pool, stay=_tensors(shared))
            return keeping_in(arena, kind=self.device.type, stay=_tensors(shared)) if arena else nullcontext()

        try:
            yield opened
        finally:
            offload.finish()

    @property
    def device_bytes(self) -> int:
        """In use now, on the device: of the tensors in the slots of the arena there."""
        return sum(arena.bytes_in_use for on_host, arena in self._arenas.items() if not on_host)

    @property
    def host_bytes(self) -> int:
        """In use now, on the host."""
        return self.pool.bytes_in_use + sum(arena.bytes_in_use for on_host, arena in self._arenas.items() if on_host)

    def storages(self) -> set[int]:
        """Addresses of all storages, in use or not."""
        return self.pool.storages().union(*(arena.storages() for arena in self._arenas.values()))

    @cached_property
    def lanes(self) -> Lanes:
        """How copies are made."""
        return CudaLanes(self.device) if self.device.type == "cuda" else Lanes()

    def _arena(self, plan: RecomputePlan, hidden_states: Tensor, tp_size: int, on_host: bool) -> Arena:
        """That of the units which keep on the host, or of the others. Made for the inputs of the first forward."""
        if on_host not in self._arenas:
            whole = hidden_states.untyped_storage().nbytes()
            sizes = [whole // tp_size if segment.split else whole for segment in plan.segments
                     if segment.unit and segment.on_host == on_host]
            device = torch.device("cpu") if on_host else self.device
            self._arenas[on_host] = Arena(sizes * self.micro_batches, device, pinned=on_host and self.device.type == "cuda")
        return self._arenas[on_host]


def _tensors(shared: Iterable[Any]) -> Iterator[Tensor]:
    for value in tree_leaves(shared):
        if isinstance(value, nn.Module):
            yield from weights_in_use(value)
        elif isinstance(value, Tensor):
            yield value
