"""Dropout on a named RNG stream, with a mask of one byte per element on every device.

On a CPU torch's own F.dropout keeps a mask in the tensor's dtype, which is 2 or 4 times as large.
Its bernoulli draws one number at a time, which takes half of the time of a dropout. On a CPU this
module therefore draws masks itself: each 64-bit draw gives four 16-bit numbers.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config.regions import DROPOUT
from megatron_lite.model.compiled_dropout import drop, drop_and_add, drop_gradient
from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.torch_internals import disable_dynamo
from megatron_lite.recompute.region_runner import Redraw, Regions


def dropout(
    tensor: Tensor,
    probability: float,
    rng: RngStreams,
    stream: str,
    kernels: CompiledKernels | None = None,
) -> Tensor:
    """Returns `tensor` with random elements zeroed and the others scaled, which preserves the mean.

    Keeps a bool mask. At p = 0 it returns the tensor itself and keeps nothing. On a CPU p is
    rounded to a multiple of 2^-16, and the scale follows the rounded p. kernels: compiled kernels
    for the passes on a CPU.
    """
    if probability == 0.0:
        return tensor
    with rng.fork(stream):
        if _draws_itself(tensor.device):
            return _CpuDropout.apply(tensor, probability, kernels)
        return torch.native_dropout(tensor, probability, True)[0]


def add_dropped_out(
    residual: Tensor,
    branch: Tensor,
    probability: float,
    regions: Regions,
    stream: str,
    *,
    skip_tail: bool = False,
    kernels: CompiledKernels | None = None,
) -> Tensor:
    """Returns residual + dropout(branch), [s/t or s, b, h] like both, in the residual's dtype.

    Keeps a bool mask, or only the stream's state if `regions` rebuild the mask. At p = 0 it keeps
    nothing. skip_tail: the result's values are never read and are arbitrary. The function still
    draws the mask, the same one as otherwise, because backward needs it.
    """
    if probability == 0.0 and not skip_tail:
        return residual + branch
    # The redraw takes only a description of the branch. It would keep the branch itself alive.
    redraw = (
        regions.redraw(DROPOUT, partial(_draw_mask, _Like.of(branch, residual.dtype), probability))
        if probability
        else None
    )
    with regions.rng.fork(stream) if probability else nullcontext():
        kernels = kernels if _draws_itself(branch.device) else None
        return _AddDroppedOut.apply(residual, branch, probability, skip_tail, redraw, kernels)


def _draws_itself(device: torch.device) -> bool:
    """Returns whether this module draws the masks of a device, not a kernel of torch."""
    return device.type == "cpu"


class KeepMask(NamedTuple):
    """A dropout mask. mask: bool, True for a kept element. scale: 1 / (share of kept elements)."""

    mask: Tensor
    scale: float


def draw_keep_mask(shape: torch.Size, probability: float) -> KeepMask:
    """Draws a mask from the CPU generator.

    An element is dropped if its 16-bit number is among the lowest p * 2^16 numbers.
    """
    bound, scale = _bound_and_scale(probability)
    return KeepMask((_draw_numbers(shape) >= bound).view(shape), scale)


def _draw_numbers(shape: torch.Size) -> Tensor:
    """Draws a 16-bit number for each element from the CPU generator, flattened."""
    if torch.compiler.is_compiling():
        # A graph ends at the draw. The next one would take the view below for 64-bit numbers.
        return _draw_between_graphs(shape)
    # An end of None means the whole range of int64, so all 64 bits of a draw are random.
    numbers = torch.empty(-(-shape.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    return numbers.view(torch.int16)[: shape.numel()]


# The decorator imports the compiler at the first call. So eager runs must not call this function.
_draw_between_graphs = disable_dynamo(_draw_numbers)


def _bound_and_scale(probability: float) -> tuple[int, float]:
    """Returns the lowest number that keeps its element, and 1 / (share of kept elements)."""
    dropped = _dropped_of_2_16(probability)
    # The numbers are int16, so the lowest one is -2^15.
    return dropped - 2**15, 2**16 / (2**16 - dropped)


def _dropped_of_2_16(probability: float) -> int:
    # Below 2^16, so that some number keeps its element and the scale is finite.
    return min(round(probability * 2**16), 2**16 - 1)


class _Like(NamedTuple):
    """The facts of a tensor that decide which mask the next random numbers give."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype) -> _Like:
        return cls(tensor.shape, dtype, tensor.device)


def _draw_mask(like: _Like, probability: float) -> Tensor:
    """Draws the mask that `_drop_out` would draw now for a contiguous tensor like this."""
    if _draws_itself(like.device):
        return draw_keep_mask(like.shape, probability).mask
    # The kernel assigns its numbers by memory layout. `_drop_out` runs it on a contiguous tensor,
    # so only another contiguous tensor gets the same mask.
    return torch.native_dropout(
        torch.empty(like.shape, dtype=like.dtype, device=like.device), probability, True
    )[1]


def _drop_out(branch: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """Returns the branch with dropout applied, and the mask."""
    if _draws_itself(branch.device):
        mask, scale = draw_keep_mask(branch.shape, probability)
        # This operator computes tensor x mask x scale, which is the forward of a dropout too.
        return torch.ops.aten.native_dropout_backward(branch, mask, scale), mask
    dropped, mask = torch.native_dropout(branch.contiguous(), probability, True)
    return dropped, mask


def _keep_scale(probability: float, device: torch.device) -> float:
    """Returns 1 / (share of kept elements), with the probability rounded as on this device."""
    if _draws_itself(device):
        probability = _dropped_of_2_16(probability) / 2**16
    return 1.0 / (1.0 - probability)


class _CpuDropout(torch.autograd.Function):
    """Dropout that keeps only the mask. Backward applies the same operation to the gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, probability: float, kernels: CompiledKernels | None
    ) -> Tensor:
        ctx.kernels = kernels
        if kernels is None:
            mask, ctx.scale = draw_keep_mask(tensor.shape, probability)
            output = torch.ops.aten.native_dropout_backward(tensor, mask, ctx.scale)
        else:
            bound, ctx.scale = _bound_and_scale(probability)
            output, mask = kernels(
                drop, _draw_numbers(tensor.shape), tensor, bound=bound, scale=ctx.scale
            )
        ctx.save_for_backward(mask)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return _drop_gradient(ctx, grad_output, mask, grad_output.dtype), None, None


class _AddDroppedOut(torch.autograd.Function):
    """residual + dropout(branch), in the residual's dtype.

    Keeps only the mask, or the stream's state to redraw it from.

    The residual's gradient is the output's gradient, unchanged.
    """

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        branch: Tensor,
        probability: float,
        skip_tail: bool,
        redraw: Redraw | None,
        kernels: CompiledKernels | None,
    ) -> Tensor:
        ctx.kernels = kernels
        ctx.branch_dtype = branch.dtype
        ctx.redraw = redraw
        ctx.scale = _keep_scale(probability, branch.device)
        output: Tensor | None = None
        if probability:
            # The state is read before the draw: backward draws the same numbers from it.
            state = None if redraw is None else redraw.rng.state()
            if skip_tail:
                mask = _draw_mask(_Like.of(branch, residual.dtype), probability)
            elif kernels is not None:
                bound, _ = _bound_and_scale(probability)
                numbers = _draw_numbers(branch.shape)
                output, mask = kernels(
                    drop_and_add, numbers, branch, residual, bound=bound, scale=ctx.scale
                )
            else:
                branch, mask = _drop_out(branch.to(residual.dtype), probability)
            ctx.save_for_backward(mask if redraw is None else state)
            if redraw is not None:
                redraw.made(mask)
        if skip_tail:  # a view of the residual would hold it where no operation keeps it
            return residual.new_empty(()).expand_as(residual)
        if output is not None:
            return output
        # `branch` is the new tensor that `_drop_out` returned, so it may be written to.
        return branch.add_(residual) if branch.dtype == residual.dtype else residual + branch

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_branch = grad_output
        saved = ctx.saved_tensors  # read once: torch's checkpoint raises on a second read
        if saved:
            (kept,) = saved
            mask = kept if ctx.redraw is None else ctx.redraw.again(kept)
            grad_branch = _drop_gradient(ctx, grad_branch, mask, ctx.branch_dtype)
        return grad_output, grad_branch.to(ctx.branch_dtype), None, None, None, None


def _drop_gradient(ctx: Any, grad_output: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the gradient of the dropped tensor. Compiled kernels give it in `dtype`."""
    if ctx.kernels is None:
        return torch.ops.aten.native_dropout_backward(grad_output, mask, ctx.scale)
    gradient: Tensor = ctx.kernels(drop_gradient, grad_output, mask, scale=ctx.scale, dtype=dtype)
    return gradient
