"""The two ends of a stage's graph: where hidden states come in, and where they leave.

    stage k      arrive -> layers -> depart          backward: depart's gradient comes from stage k+1,
                                                               arrive's goes to stage k-1
Neither keeps the hidden states: a received input lives as long as a layer keeps it, an output until it has been sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def arrive(received: Tensor, return_grad: Callable[[Tensor], None]) -> Tensor:
    """`received` as the input of a stage. Backward hands its gradient, contiguous, to `return_grad`."""
    return _Arrival.apply(torch.empty(0, requires_grad=True), received, return_grad)


def depart(output: Tensor, fetch_grad: Callable[[], Tensor]) -> Tensor:
    """An empty tensor in place of a stage's output. Its backward begins with the gradient that `fetch_grad` then returns."""
    return _Departure.apply(output, fetch_grad)


def run_backward(end: Tensor) -> None:
    """Backward through one micro-batch's stage. end: its loss, or what `depart` returned."""
    torch.autograd.backward([end], [torch.ones_like(end)])


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, received: Tensor, return_grad: Callable[[Tensor], None]) -> Tensor:
        ctx.return_grad = return_grad
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.return_grad(grad.contiguous())
        return None, None, None


class _Departure(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, fetch_grad: Callable[[], Tensor]) -> Tensor:
        ctx.fetch_grad = fetch_grad
        return output.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.fetch_grad(), None
