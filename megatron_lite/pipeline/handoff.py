"""The two ends of a stage's graph: the hidden states enter at one and leave at the other.

    stage k    arrive -> layers -> depart    backward: depart's gradient comes from stage k+1,
                                                       arrive's gradient goes to stage k-1

Neither end keeps the hidden states. A received input lives as long as a layer keeps it, and an
output lives until it has been sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def arrive(received: Tensor, return_grad: Callable[[Tensor], None]) -> Tensor:
    """Returns `received` as the input of a stage's graph. Both are [s/t or s, b, h].

    Backward passes the input's gradient, contiguous, to `return_grad`.
    """
    # Autograd runs a Function's backward only if an input requires gradients. The empty anchor
    # does; `received` does not, so no gradient accumulates on it.
    return _Received.apply(torch.empty(0, requires_grad=True), received, return_grad)


def depart(output: Tensor, fetch_grad: Callable[[], Tensor]) -> Tensor:
    """Returns an empty tensor [0] that stands for a stage's output [s/t or s, b, h] in backward.

    Its backward calls `fetch_grad` and uses the result as the gradient of the output.
    """
    return _Departure.apply(output, fetch_grad)


def run_backward(end: Tensor) -> None:
    """Runs backward of one micro-batch through one stage.

    end: the loss, or the tensor that `depart` returned.
    """
    # The tensor of `depart` has no elements, so its gradient is empty; `depart` fetches the true
    # one.
    torch.autograd.backward([end], [torch.ones_like(end)])


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, received: Tensor, return_grad: Callable[[Tensor], None]
    ) -> Tensor:
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
