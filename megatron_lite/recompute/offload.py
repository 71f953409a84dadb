"""Offloads the tensors that a segment keeps for backward to host memory: `@host` in a policy.

    forward    Each storage that is saved is copied to a host buffer, beside the computation. The
               original is freed when the next segment ends. So at most two segments have
               originals on the device whose copies are under way.
    backward   The first read of a segment starts the copies back to the device for all tensors of
               that segment and of the segment before it. The copies for the segment before
               arrive while this segment is computed.

The host never waits. Where an order matters, one stream of the device waits for an event of
another. On a CPU the same code runs with plain copies. Parameters, tensors that all layers share,
and states of generators are not moved: see saved.py.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from megatron_lite.parallel.torch_internals import next_node_number, write_count_of

from .pool import Memory, Slot
from .saved import MovedStorage, WrittenTo, bytes_of, moving

_READING = RLock()  # autograd has a thread for each device, and a layer may be on several
Mark = Any  # the end of a copy: an event of the device, or None if the copy is synchronous


class CopyStreams:
    """Copies between device and host. This class serves a CPU, where each copy is synchronous.

    A subclass copies beside the computation, in order within each direction.
    """

    def copy(self, target: Tensor, source: Tensor, *, after: Mark, back: bool) -> Mark:
        """Copies `source` to `target`, after all computation issued so far and after a mark.
        Returns the mark of the copy's own end.

        back: whether the copy is from the host to the device. The computation so far may still use
            the memory of `target`, if the allocator used it before.
        """
        target.copy_(source)

    def wait(self, mark: Mark) -> None:
        """Makes all computation issued from here on run after the copy."""

    def forsake(self, target: Tensor) -> None:
        """Protects the memory of `target` on the device, which is freed without any wait for its
        copy."""


class CudaCopyStreams(CopyStreams):
    """Copies on side streams of CUDA devices. side: that of a device and a direction."""

    def __init__(self) -> None:
        self.side = cache(lambda device, back: torch.cuda.Stream(device))

    def copy(self, target: Tensor, source: Tensor, *, after: Mark, back: bool) -> Mark:
        """Copies `source` to `target`, after all work on the device's current stream so far."""
        # Elsewhere than on a stream of its own device a copy would run on the current one.
        device = (target if back else source).device
        stream = self.side(device, back)
        stream.wait_stream(torch.cuda.current_stream(device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, mark: Mark) -> None:
        """Makes the current stream of the copy's device wait for it."""
        torch.cuda.current_stream(mark.device).wait_event(mark)

    def forsake(self, target: Tensor) -> None:
        """Keeps the allocator from using the memory of `target` again before the copy has ended."""
        target.record_stream(self.side(target.device, True))


def copy_streams_of(device: torch.device) -> CopyStreams:
    """Returns the object that copies between a device and the host."""
    return CudaCopyStreams() if device.type == "cuda" else CopyStreams()


class Offload:
    """The segments of one forward that offload, in order. Call `finish` after the last one."""

    def __init__(self, copy_streams: CopyStreams, *, kind: str) -> None:
        self._copy_streams, self._kind = copy_streams, kind
        self._before = _SegmentCopies(None)  # the last segment that offloaded a tensor

    @contextmanager
    def segment(
        self, memory: Memory, *, stay: Iterable[Tensor], wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Offloads the tensors that the forward of a segment saves inside the block.

        memory: the host memory that the copies go to.
        stay: tensors that are not moved. saved.py lists what else is not moved.
        wanted: whether a storage that is saved now, for the first time, is moved.
        """
        group = _SegmentCopies(self._before)

        def move(tensor: Tensor) -> MovedStorage | None:
            if not wanted():
                return None
            group.copy_out(next_node_number())
            slot = memory.take(tensor.untyped_storage().nbytes())
            copy = _OnHost(self._copy_streams, slot, group, tensor.detach())
            group.copies.append(weakref.ref(copy))
            group.waiting.append(copy)
            return copy.memory

        # The originals stay alive for one more segment. Without that the current stream would have
        # to wait for the copies at the end of each segment, before the allocator may use their
        # memory.
        try:
            with moving(move, kind=self._kind, stay=stay):
                yield
        finally:
            group.copy_out()
            self.finish()
            self._before = group if group.copies else self._before

    def finish(self) -> None:
        """Frees the last segment's originals once the current stream waits for their copies."""
        held = [copy for each in self._before.copies if (copy := each())]
        copies = [copy for copy in held if copy.original is not None]
        for last in {copy.original.device: copy for copy in copies}.values():
            self._copy_streams.wait(last.left)
        for copy in copies:
            copy.free_original()


class _SegmentCopies:
    """The copies of one segment. It refers to them weakly, while each copy holds its group.

    So a copy lives only as long as the graph needs it. An error in a forward drops both.

    before: the group of the segment before; None if this one gets no copies.
    waiting: the copies before their `copy_out`.
    """

    def __init__(self, before: Any) -> None:
        self.before = before
        self.copies: list[weakref.ref[_OnHost]] = []
        self.waiting: list[_OnHost] = []

    def copy_out(self, before: float = math.inf) -> None:
        """Starts the copies of what operators with a smaller number than `before` have saved.

        An operator may save a tensor before it fills it (RReLU), so a copy begins when another
        operator saves, which has a larger number, or when the segment ends.
        """
        while self.waiting and self.waiting[0].next_node < before:
            self.waiting.pop(0).copy_out()

    def call_back(self) -> None:
        """Starts the segment's copies back to the device, in the order of backward."""
        while self.copies:
            if copy := self.copies.pop()():
                copy.call_back()


@dataclass(eq=False)
class _OnHost:
    """The host copy of one storage. From the end of its forward on it lives as long as the graph
    needs it.

    original: the tensor, whose memory stays in use until the copy to the host has ended.
    version, next_node: its version, and the number of the graph's next node, when it was saved.
    left: the mark of the end of the copy to the host.
    torn: whether the original was written to while it was being copied.
    """

    _copy_streams: CopyStreams
    slot: Slot
    _group: _SegmentCopies
    original: Any
    _returned: Tensor | None = None
    _is_awaited: bool = True
    left: Mark = None
    torn: bool = False

    def __post_init__(self) -> None:
        self.version, self.next_node = write_count_of(self.original), next_node_number()
        self._device = self.original.device

    def copy_out(self) -> None:
        """Starts the copy of the original to the host."""
        # The slot's last user may still be copied back from it, on the other side stream.
        self.slot.last_use = self.left = self._copy_streams.copy(
            self.slot.memory, bytes_of(self.original), after=self.slot.last_use, back=False
        )

    def free_original(self) -> None:
        """Frees the original. The current stream must wait for its copy before.

        An original that was written to since it was saved may have been copied half-written. Its
        copy is marked as torn, and a read of it raises.
        """
        self.torn = write_count_of(self.original) != self.version
        self.original = None

    def call_back(self) -> None:
        """Starts the copy back to the device, unless it was started before.

        The host memory is kept as well. If the graph is retained, so is the memory on the device.
        """
        if self.original is not None:  # no segment of the forward came behind
            self._copy_streams.wait(self.left)
            self.free_original()
        if self._returned is None:
            self._returned = torch.empty(
                self.slot.memory.numel(), dtype=torch.uint8, device=self._device
            )
            self.slot.last_use = self._copy_streams.copy(
                self._returned, self.slot.memory, after=self.slot.last_use, back=True
            )
            self._is_awaited = False

    def memory(self) -> Tensor:
        """Returns the bytes of the storage on the device, ready for the current stream.

        It also starts the copies of the rest of its segment and of the segment before.
        WrittenTo: the original was written to while it was being copied to the host.
        """
        with _READING:
            self._group.copy_out()  # in a backward inside the forward
            self.call_back()
            if self.torn:
                raise WrittenTo(
                    "a tensor that was saved for backward has been modified by an inplace "
                    "operation while it was being copied to host memory"
                )
            self._group.call_back()
            self._group.before.call_back()
            assert self._returned is not None
            if not self._is_awaited:
                self._copy_streams.wait(self.slot.last_use)
                self._is_awaited = True
            return self._returned

    def __del__(self) -> None:
        if self.original is not None and self.left is not None:  # after an error in the forward
            self._copy_streams.wait(self.left)
        # The copy back was started with its segment, and no operation has read it. It may still
        # be writing when the allocator gets the memory.
        if not self._is_awaited and self._returned is not None:
            self._copy_streams.forsake(self._returned)
