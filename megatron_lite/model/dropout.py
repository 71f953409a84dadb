"""Dropout on a named RNG stream, with a mask of one byte per element on every device.

torch's own F.dropout keeps a mask in the tensor's dtype on the CPU, 2 or 4 times as large, and its bernoulli draws one number
at a time there: half of the time of a dropout. So the CPU has its own drawing, four 16-bit numbers from each 64-bit draw.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.parallel.rng import RngStreams


def dropout(tensor: Tensor, probability: float, rng: RngStreams, stream: str) -> Tensor:
    """`tensor` with elements zeroed and the rest scaled so that the mean stays; the tensor itself at p = 0. Keeps a bool mask.

    On the CPU p is rounded to a multiple of 2^-16, and the scale is that of the rounded p.
    """
    if probability == 0.0:
        return tensor
    with rng.fork(stream):
        if tensor.device.type == "cpu":
            return _CpuDropout.apply(tensor, probability)
        return torch.native_dropout(tensor, probability, True)[0]


def add_dropped_out(residual: Tensor, branch: Tensor, probability: float, rng: RngStreams, stream: str, *,
                    unread: bool = False) -> Tensor:
    """residual + dropout(branch). Keeps a bool mask, nothing at p = 0.

    unread: nobody will read the values, which are then anything: only the mask is drawn, the same one as otherwise.
    """
    if probability == 0.0 and not unread:
        return residual + branch
    with rng.fork(stream) if probability else nullcontext():
        return _AddDroppedOut.apply(residual, branch, probability, unread)


class KeepMask(NamedTuple):
    """mask: bool, True where an element is kept. scale: 1 / (share of kept elements)."""

    mask: Tensor
    scale: float


def draw_keep_mask(shape: torch.Size, probability: float) -> KeepMask:
    """A mask from the CPU generator: each element is dropped if its 16-bit number is among the lowest p * 2^16."""
    dropped = min(round(probability * 2**16), 2**16 - 1)
    numbers = torch.empty(-(-shape.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    return KeepMask((numbers[: shape.numel()] >= dropped - 2**15).view(shape), 2**16 / (2**16 - dropped))


class _CpuDropout(torch.autograd.Function):
    """Keeps the mask alone. Its own dual."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, probability: float) -> Tensor:
        mask, ctx.scale = draw_keep_mask(tensor.shape, probability)
        ctx.save_for_backward(mask)
        return torch.ops.aten.native_dropout_backward(tensor, mask, ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grad_output, mask, ctx.scale), None


class _AddDroppedOut(torch.autograd.Function):
    """Keeps the mask alone. The residual's gradient is the output's."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, branch: Tensor, probability: float, unread: bool) -> Tensor:
        ctx.branch_dtype, ctx.scale, mask = branch.dtype, 1.0, None
        if branch.device.type != "cpu" and probability:
            # Unread, `branch` may be laid out otherwise, and the kernel would give its numbers to other elements.
            dropped = torch.empty(branch.shape, dtype=branch.dtype, device=branch.device) if unread else branch
            branch, mask = torch.native_dropout(dropped, probability, True)
            ctx.scale = 1.0 / (1.0 - probability)
        elif probability:
            mask, ctx.scale = draw_keep_mask(branch.shape, probability)
            branch = branch if unread else torch.ops.aten.native_dropout_backward(branch, mask, ctx.scale)
        ctx.save_for_backward(*(() if mask is None else (mask,)))
        if unread:
            return residual.view_as(residual)
        return branch.add_(residual) if branch.dtype == residual.dtype else residual + branch

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_branch = grad_output.to(ctx.branch_dtype)
        if ctx.saved_tensors:
            grad_branch = torch.ops.aten.native_dropout_backward(grad_branch, ctx.saved_tensors[0], ctx.scale)
        return grad_output, grad_branch, None, None
