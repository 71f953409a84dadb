"""The way of gradients to the host, where an update takes place, and of weights back.

    gradient of part i + 1  ->  buffer        on a side stream, while the host updates part i
    buffer of part i        ->  update of its main weight and moments, in the host's memory
    weight of part i, rounded into a buffer  ->  the device, on another side stream

Only the buffers are page-locked: two for each direction, which are used again and again. The host
waits for a gradient before it reads it, and for the last use of a buffer of weights before it
writes there. On a CPU the same code runs with plain copies, and without
`--overlap-cpu-optimizer-d2h-h2d` on the current stream, one part after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import optimizer_settings
from megatron_lite.optim.layouts import Piece


class HostLink:
    """Copies between a device and its host.

    size: the elements of the largest part. grad, weight: tensors in the formats of what is copied.
    buffers: the memory on the host.
    """

    def __init__(self, size: int, grad: Tensor, weight: Tensor, *, overlaps: bool) -> None:
        self._device, self._overlaps, is_cuda = grad.device, overlaps, grad.device.type == "cuda"
        self._grads, self._weights = (
            [torch.empty(size, dtype=one.dtype, pin_memory=is_cuda) for _ in range(2)]
            for one in (grad, weight)
        )
        self.buffers = (*self._grads, *self._weights)
        self._sides: Sequence[Any] = (None, None)
        if is_cuda and overlaps:
            self._sides = (torch.cuda.Stream(self._device), torch.cuda.Stream(self._device))
        self._num_sent = 0
        self._sent: list[Any] = [None, None]  # the ends of the last copies from `_weights`

    def arriving(self, grads: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yields the gradients on the host, in order. Each is valid until the next is asked for.

        They must be complete on the current stream.
        """
        for side in filter(None, self._sides):
            side.wait_stream(torch.cuda.current_stream(self._device))
        under_way: list[tuple[Tensor, Any]] = []
        for number, grad in enumerate(grads):
            # The buffer's last reader was the update before the one that comes now.
            host = self._grads[number % 2][: grad.numel()]
            under_way.append((host, self._copy(self._sides[0], host, grad)))
            if len(under_way) > self._overlaps:
                yield self._arrived(*under_way.pop(0))
        for one in under_way:
            yield self._arrived(*one)

    def send(self, weight: Tensor, values: Tensor) -> None:
        """Rounds the values into a weight of the device. Call `finish` after the last one."""
        place = self._num_sent % 2
        self._num_sent += 1
        if self._sent[place] is not None:
            self._sent[place].synchronize()
        host = self._weights[place][: values.numel()].copy_(values)
        self._sent[place] = self._copy(self._sides[1], weight, host)

    def finish(self) -> None:
        """Makes all computation issued from here on run after the copies of weights."""
        for side in filter(None, self._sides):
            torch.cuda.current_stream(self._device).wait_stream(side)

    def _arrived(self, host: Tensor, mark: Any) -> Tensor:
        if mark is not None:
            mark.synchronize()
        return host

    def _copy(self, side: Any, target: Tensor, source: Tensor) -> Any:
        """Returns an event at the end of the copy; None if the copy is synchronous."""
        if self._device.type != "cuda":
            target.copy_(source)
            return None
        with torch.cuda.stream(side):  # None: the current stream
            target.copy_(source, non_blocking=True)
            return torch.cuda.current_stream(self._device).record_event()


def link_of(hosted: Sequence[Piece], *, overlaps: bool) -> HostLink:
    """Returns the way to the host for these pieces."""
    size = min(optimizer_settings.PART, max(piece.weight.numel() for piece in hosted))
    return HostLink(size, hosted[0].grad, hosted[0].weight, overlaps=overlaps)
