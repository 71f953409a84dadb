"""Dropout on a named RNG stream, with a mask of one byte per element on every device.

torch's own F.dropout keeps a mask in the tensor's dtype on the CPU, 2 or 4 times as large, and its bernoulli draws one number
at a time there: half of the time of a dropout. So the CPU has its own drawing, four 16-bit numbers from each 64-bit draw.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.parallel.rng import RngStreams
from megatron_lite.recompute.plan import DROPOUT
from megatron_lite.recompute.regions import Redraw, Regions


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


def add_dropped_out(residual: Tensor, branch: Tensor, probability: float, regions: Regions, stream: str, *,
                    unread: bool = False) -> Tensor:
    """residual + dropout(branch). Keeps a bool mask, or where `regions` rebuild it the stream's state; nothing at p = 0.

    unread: nobody will read the values, which are then anything: only the mask is drawn, the same one as otherwise.
    """
    if probability == 0.0 and not unread:
        return residual + branch
    # Of the branch only its description: the tensor itself would be kept.
    redraw = regions.redraw(DROPOUT, partial(_draw_mask, _Like.of(branch), probability)) if probability else None
    with regions.rng.fork(stream) if probability else nullcontext():
        return _AddDroppedOut.apply(residual, branch, probability, unread, redraw)


class KeepMask(NamedTuple):
    """mask: bool, True where an element is kept. scale: 1 / (share of kept elements)."""

    mask: Tensor
    scale: float


def draw_keep_mask(shape: torch.Size, probability: float) -> KeepMask:
    """A mask from the CPU generator: each element is dropped if its 16-bit number is among the lowest p * 2^16."""
    dropped = _dropped_of_2_16(probability)
    numbers = torch.empty(-(-shape.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    return KeepMask((numbers[: shape.numel()] >= dropped - 2**15).view(shape), 2**16 / (2**16 - dropped))


def _dropped_of_2_16(probability: float) -> int:
    return min(round(probability * 2**16), 2**16 - 1)


class _Like(NamedTuple):
    """What decides which mask the next random numbers make."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Like:
        return cls(tensor.shape, tensor.dtype, tensor.device)


def _draw_mask(like: _Like, probability: float) -> Tensor:
    """The mask that `_drop_out` would draw now for a contiguous tensor like this."""
    if like.device.type == "cpu":
        return draw_keep_mask(like.shape, probability).mask
    # The kernel gives its numbers to other elements of a tensor that is laid out otherwise: hence one made for it.
    return torch.native_dropout(torch.empty(like.shape, dtype=like.dtype, device=like.device), probability, True)[1]


def _drop_out(branch: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """(dropped out, mask)."""
    if branch.device.type == "cpu":
        mask, scale = draw_keep_mask(branch.shape, probability)
        return torch.ops.aten.native_dropout_backward(branch, mask, scale), mask
    dropped, mask = torch.native_dropout(branch.contiguous(), probability, True)
    return dropped, mask


def _keep_scale(probability: float, device: torch.device) -> float:
    """1 / (share of kept elements)."""
    if device.type == "cpu":
        probability = _dropped_of_2_16(probability) / 2**16
    return 1.0 / (1.0 - probability)


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
    """Keeps the mask alone, or what to redraw it from. The residual's gradient is the output's."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, branch: Tensor, probability: float, unread: bool, redraw: Redraw | None) -> Tensor:
        ctx.branch_dtype, ctx.redraw, ctx.scale = branch.dtype, redraw, _keep_scale(probability, branch.device)
        if probability:
            state = None if redraw is None else redraw.rng.state()
            branch, mask = (branch, _draw_mask(_Like.of(branch), probability)) if unread else _drop_out(branch, probability)
            ctx.save_for_backward(mask if redraw is None else state)
            if redraw is not None:
                redraw.made(mask)
        if unread:
            return residual.view_as(residual)
        return branch.add_(residual) if branch.dtype == residual.dtype else residual + branch

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_branch = grad_output.to(ctx.branch_dtype)
        saved = ctx.saved_tensors  # read once: torch's checkpoint allows no second time
        if saved:
            (kept,) = saved
            mask = kept if ctx.redraw is None else ctx.redraw.again(kept)
            grad_branch = torch.ops.aten.native_dropout_backward(grad_branch, mask, ctx.scale)
        return grad_output, grad_branch, None, None, None
