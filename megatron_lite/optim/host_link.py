"""The way of gradients to the host, where an update takes place, and of weights back.

    final gradient  ->  its place on the host     on a side stream, beside backward
    place           ->  update of its main weight and moments, part by part, on the host
    weight, rounded into a buffer  ->  the device, on another side stream, beside the update of the
                                   next parts and the next forward

That is `--overlap-cpu-optimizer-d2h-h2d`. The update itself begins after the whole backward: it
needs the norm of all gradients, to clip them and to skip a step. A gradient goes to the host
before it is divided by the loss scale and clipped, so the host repeats these products. Without the
flag a buffer takes one finished gradient after the other, on the current stream.

The host waits for a gradient before it reads it, and for the last use of a buffer of weights before
it writes there. A module waits for its own weights before its forward. What copies read or write on
the host is page-locked. On a CPU the same calls copy at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_lite.config import optimizer_settings

if TYPE_CHECKING:
    from .layouts import Piece
    from .stored import Part


class HostLink:
    """Copies between a device and its host.

    hosted: the pieces there. overlaps: whether each gradient has a place of its own.
    factors: what the step multiplies gradients by, 0-d.
    buffers: the memory on the host.
    """

    def __init__(self, hosted: Sequence[Piece], *, overlaps: bool) -> None:
        self.overlaps, grad = overlaps, hosted[0].grad
        self._device, self._pieces = grad.device, {piece.name: piece for piece in hosted}
        sizes = {name: piece.weight.numel() for name, piece in self._pieces.items()}
        part = min(optimizer_settings.PART, max(sizes.values()))

        def places(like: Tensor, sizes: Sequence[int]) -> list[Tensor]:
            pins = self._device.type == "cuda"
            return [torch.empty(size, dtype=like.dtype, pin_memory=pins) for size in sizes]

        own = places(grad, [*sizes.values()] if overlaps else [part])
        self._weights = places(hosted[0].weight, [part, part])
        self._grads = dict(zip(sizes, own if overlaps else own * len(sizes), strict=True))
        self.buffers = (*own, *self._weights)
        self._sides: Sequence[Any] = (None, None)
        if self._device.type != "cpu" and overlaps:
            self._sides = (torch.cuda.Stream(self._device), torch.cuda.Stream(self._device))
        self.factors: list[Tensor] = []
        self._taken: dict[str, Any] = {}  # the ends of the copies of gradients
        self._num_sent = 0
        self._sent: list[Any] = [None, None]  # the ends of the last copies from `_weights`
        self._returning: dict[str, Any] = {}  # the ends of the copies of weights

    def aside(self) -> AbstractContextManager[object]:
        """Makes what is issued in the block run on the stream of the gradients' copies."""
        return torch.cuda.stream(self._sides[0])  # None: the current stream

    def take(self, name: str) -> None:
        """Begins to copy the gradient of a parameter. It is complete on the current stream."""
        if (piece := self._pieces.get(name)) is not None:
            self._taken[name] = self._copy(self._sides[0], self._grads[name], piece.grad.view(-1))

    def join(self) -> None:
        """Makes all computation issued from here on run after the copies of gradients."""
        if self._sides[0] is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._sides[0])

    def arriving(self, parts: Sequence[Part]) -> Iterator[Tensor]:
        """Yields the gradients of the parts on the host. Each is valid until the next is asked for.

        Without overlap they must be complete on the current stream, factors included.
        """
        factors = [factor.cpu() for factor in self.factors if self.overlaps]
        for part in parts:
            name = part.piece.name
            if self.overlaps:
                host = self._grads[name][part.place]
            else:
                host = self._grads[name][: part.grad.numel()]
                self._taken[name] = self._copy(None, host, part.grad)
            self._arrived(self._taken[name])
            for factor in factors:
                host.mul_(factor)
            yield host

    def send(self, part: Part, values: Tensor) -> None:
        """Rounds the values into the weight of a part on the device. See `wait_for`."""
        place = self._num_sent % 2
        self._num_sent += 1
        self._arrived(self._sent[place])
        host = self._weights[place][: values.numel()].copy_(values)
        mark = self._copy(self._sides[1], part.weight, host)
        self._sent[place] = self._returning[part.piece.name] = mark

    def wait_for(self, name: str) -> None:
        """Makes all computation issued from here on run after the copies of a weight."""
        if (mark := self._returning.pop(name, None)) is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        """Waits for all weights."""
        for name in [*self._returning]:
            self.wait_for(name)

    def _arrived(self, mark: Any) -> None:
        """Makes the host wait for a copy."""
        if mark is not None:
            mark.synchronize()

    def _copy(self, side: Any, target: Tensor, source: Tensor) -> Any:
        """Returns an event at the end of the copy; None if the copy is synchronous."""
        if self._device.type == "cpu":
            target.copy_(source)
            return None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):  # None: the current stream
            target.copy_(source, non_blocking=True)
            return torch.cuda.current_stream(self._device).record_event()
