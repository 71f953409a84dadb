"""What a segment keeps for backward waits in host memory: `@host` in a policy.

    forward    each storage that is saved is copied to a buffer, beside the computation; the original is freed when the next
               segment ends, so that the originals of two segments at most are on their way
    backward   the first read of a segment starts the copies back of all that it kept and of all that the segment before it
               kept, so that these arrive while the segment itself is computed

Nothing waits on the host: where an order matters, one stream of the device waits for an event of another. On a CPU the same code
runs with plain copies. Parameters, what all layers share, and states of generators are not moved: see saved.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.recompute.pool import Memory, Slot
from megatron_lite.recompute.saved import bytes_of, moving

Mark = Any  # the end of a copy: an event of the device, None where the copy is over when it is asked for


class Lanes:
    """Copies between device and host, in order within each direction, beside the computation. This one is a CPU's: at once.

    after: a mark; the copy begins no earlier.
    """

    def out(self, host: Tensor, source: Tensor, *, after: Mark) -> Mark:
        """Copies to the host what the computation has made so far."""
        host.copy_(source)

    def back(self, target: Tensor, host: Tensor, *, after: Mark) -> Mark:
        """Copies to the device, into memory that the computation has had for itself so far."""
        target.copy_(host)

    def wait(self, mark: Mark) -> None:
        """From here on the computation finds the copy done."""

    def forsake(self, target: Tensor) -> None:
        """Nobody waited for the copy back into it, and it is about to be freed."""


class CudaLanes(Lanes):
    """A stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out(self, host: Tensor, source: Tensor, *, after: Mark) -> Mark:
        """Copies to the host what the current stream has made so far."""
        return self._copy(self._out, host, source, after)

    def back(self, target: Tensor, host: Tensor, *, after: Mark) -> Mark:
        """Copies to the device, into memory that the current stream has had for itself so far."""
        return self._copy(self._back, target, host, after)

    def wait(self, mark: Mark) -> None:
        """The current stream waits."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def forsake(self, target: Tensor) -> None:
        """Its memory is not used again before the copy is over."""
        target.record_stream(self._back)

    def _copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor, after: Mark) -> Mark:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()


class Offload:
    """One forward's segments that keep on the host, in order. `finish` it when the last one has run."""

    def __init__(self, lanes: Lanes, *, kind: str) -> None:
        self._lanes, self._kind = lanes, kind
        self._before: _Group | None = None  # the last segment that kept something
        self._leaving: list[_Leaving] = []  # the originals of the last segment

    @contextmanager
    def segment(self, memory: Memory, *, stay: Iterable[Tensor]) -> Iterator[None]:
        """Around the forward of a segment. memory: where on the host. stay: what is not moved; saved.py says what else."""
        group, leaving = _Group(self._before), []

        def move(tensor: Tensor) -> _OnHost:
            storage = tensor.untyped_storage()
            slot = memory.take(storage.nbytes())
            slot.last_use = self._lanes.out(slot.memory, bytes_of(storage), after=slot.last_use)
            copy = _OnHost(self._lanes, slot, group, tensor.device)
            group.copies.append(weakref.ref(copy))
            leaving.append(_Leaving(tensor.detach(), tensor._version, weakref.ref(copy), slot.last_use))
            return copy

        try:
            with moving(move, kind=self._kind, stay=stay):
                yield
        finally:
            self.finish()
            self._leaving = leaving
            self._before = group if group.copies else self._before

    def finish(self) -> None:
        """Frees the originals that are still on their way, once they are on the host."""
        if self._leaving:
            self._lanes.wait(self._leaving[-1].mark)
        for original in self._leaving:
            copy = original.copy()
            if copy is not None and original.tensor._version != original.version:
                copy.torn = True
        self._leaving.clear()  # the list itself: the graph holds the hooks, and they hold it


class _Leaving(NamedTuple):
    """tensor: keeps the memory until the copy is over. version: of the tensor when it was saved."""

    tensor: Tensor
    version: int
    copy: weakref.ref[_OnHost]
    mark: Mark


class _Group:
    """The copies of one segment. Held by them, and not the other way round: they live as long as the graph needs them."""

    def __init__(self, before: _Group | None) -> None:
        self.before = before
        self.copies: list[weakref.ref[_OnHost]] = []
        self._called = False

    def call_back(self) -> None:
        """Starts the copies back, in the order of backward."""
        if self._called:
            return
        self._called = True
        for reference in reversed(self.copies):
            copy = reference()
            if copy is not None:
                copy.call_back()


class _OnHost:
    """The copy of a storage, from its way to the host until the graph no longer needs it."""

    def __init__(self, lanes: Lanes, slot: Slot, group: _Group, device: torch.device) -> None:
        self._lanes, self._slot, self._group, self._device = lanes, slot, group, device
        self._returned: Tensor | None = None
        self._is_awaited = True
        self.torn = False

    def call_back(self) -> None:
        """Starts the copy back, if nobody has. The host's is kept: where the graph is retained, the device's is too."""
        if self._returned is None:
            self._returned = torch.empty(self._slot.memory.numel(), dtype=torch.uint8, device=self._device)
            self._slot.last_use = self._lanes.back(self._returned, self._slot.memory, after=self._slot.last_use)
            self._is_awaited = False

    def memory(self) -> Tensor:
        """Its bytes on the device."""
        if self.torn:
            raise RuntimeError("a tensor that was saved for backward has been modified by an inplace operation while it was "
                               "being copied to host memory")
        self.call_back()
        self._group.call_back()
        if self._group.before is not None:
            self._group.before.call_back()
        assert self._returned is not None
        if not self._is_awaited:
            self._lanes.wait(self._slot.last_use)
            self._is_awaited = True
        return self._returned

    def __del__(self) -> None:
        if not self._is_awaited and self._returned is not None:
            self._lanes.forsake(self._returned)
