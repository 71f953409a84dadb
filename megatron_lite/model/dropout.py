"""Dropout on a named RNG stream, with a mask of one byte per element on every device.

On a CPU torch's own F.dropout keeps a mask in the tensor's dtype, which is 2 or 4 times as large.
Its bernoulli draws one number at a time, which takes half of the time of a dropout. On a CPU this
module therefore draws the numbers itself: each 64-bit draw gives four of 16 bits. So it does for
compiled kernels on every device: one kernel then makes the mask, drops, and adds the residual.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.regions import DROPOUT
from megatron_lite.parallel.compiled import Gradients, Kernels, run
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.torch_internals import disable_dynamo
from megatron_lite.recompute.region_runner import Redraw, Regions

CPU = torch.device("cpu")


def dropout(
    tensor: Tensor, probability: float, rng: RngStreams, stream: str, kernels: Kernels = None
) -> Tensor:
    """Returns `tensor` with random elements zeroed and the others scaled, which preserves the mean.

    Keeps a bool mask. At p = 0 it returns the tensor itself and keeps nothing. On a CPU, and with
    compiled kernels, p is rounded to a multiple of 2^-16, and the scale follows the rounded p.
    """
    if probability == 0.0:
        return tensor
    with rng.fork(stream):
        return _Dropout.apply(None, tensor, None, probability, False, None, kernels)


def add_dropped_out(
    residual: Tensor,
    branch: Tensor,
    probability: float,
    regions: Regions,
    stream: str,
    *,
    bias: Tensor | None,
    skip_tail: bool,
    kernels: Kernels,
) -> Tensor:
    """Returns residual + dropout(branch + bias), [s/t or s, b, h], in the residual's dtype.

    Keeps a bool mask, or only the stream's state if `regions` rebuild the mask. At p = 0 it keeps
    nothing. bias: [h], or None.
    skip_tail: the result's values are never read and are arbitrary. The function still draws the
        mask, the same one as otherwise, because backward needs it.
    """
    if probability == 0.0 and bias is None and not skip_tail:
        return residual + branch
    # The redraw takes no tensor, which it would keep alive.
    draw = partial(_draw_mask, branch.shape, residual.dtype, branch.device, probability, kernels)
    redraw = regions.redraw(DROPOUT, draw) if probability else None
    with regions.rng.fork(stream) if probability else nullcontext():
        return _Dropout.apply(residual, branch, bias, probability, skip_tail, redraw, kernels)


def _draws_itself(device: torch.device, kernels: Kernels) -> bool:
    """Returns whether this module draws the masks of a device, not a kernel of torch."""
    return device.type == "cpu" or kernels is not None


def draw_numbers(shape: torch.Size, device: torch.device) -> Tensor:
    """Draws a 16-bit number for each element from the device's generator, flattened."""
    if torch.compiler.is_compiling():
        # A graph ends at the draw. The next one would take the view below for 64-bit numbers.
        return _draw_between_graphs(shape, device)
    numbers = torch.empty(-(-shape.numel() // 4), dtype=torch.int64, device=device)
    # An end of None means the whole range of int64, so all 64 bits of a draw are random.
    numbers.random_(-(2**63), None)
    return numbers.view(torch.int16)[: shape.numel()]


# The decorator imports the compiler at the first call. So eager runs must not call this function.
_draw_between_graphs = disable_dynamo(draw_numbers)


def _num_dropped(probability: float) -> int:
    """Returns how many of the 2^16 numbers drop their element: the lowest ones, from -2^15 on."""
    # Below 2^16, so that some number keeps its element and the scale is finite.
    return min(round(probability * 2**16), 2**16 - 1)


def keep_scale(probability: float, device: torch.device, kernels: Kernels = None) -> float:
    """Returns 1 / (share of kept elements), with the probability rounded as on this device."""
    if _draws_itself(device, kernels):
        probability = _num_dropped(probability) / 2**16
    return 1.0 / (1.0 - probability)


def keep_mask(numbers: Tensor, shape: torch.Size, probability: float) -> Tensor:
    """Returns the mask [shape] of the kept elements, from a 16-bit number for each element."""
    return numbers.view(shape) >= _num_dropped(probability) - 2**15


def drop(
    tensor: Tensor,
    numbers: Tensor,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    probability: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns dropout of the tensor, after and before additions if there are any, and the mask."""
    mask = keep_mask(numbers, tensor.shape, probability)
    dropped = drop_backward(tensor if bias is None else tensor + bias, mask, scale=scale)
    return dropped if residual is None else dropped.add_(residual), mask


def drop_backward(
    grad_output: Tensor, mask: Tensor, *, scale: float, has_bias: bool = False
) -> Any:
    """Returns gradient x mask x scale, which is the forward of a dropout too.

    has_bias: returns the gradient of a bias besides, the sum over the tokens.
    """
    grad = torch.ops.aten.native_dropout_backward(grad_output, mask, scale)
    return (grad, grad.flatten(0, -2).sum(0)) if has_bias else grad


def add_biased(branch: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
    """Returns the sum of the three."""
    return branch + bias + residual


def _draw_mask(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    probability: float,
    kernels: Kernels,
) -> Tensor:
    """Draws the mask that `_Dropout` would draw now for a tensor of this kind."""
    if _draws_itself(device, kernels):
        return keep_mask(draw_numbers(shape, device), shape, probability)
    # The kernel assigns its numbers by memory layout. `_Dropout` runs it on a contiguous tensor, so
    # only another contiguous tensor gets the same mask.
    empty = torch.empty(shape, dtype=dtype, device=device)
    return torch.native_dropout(empty, probability, True)[1]


class _Dropout(torch.autograd.Function):
    """dropout(branch + bias), plus the residual if there is one, in the residual's dtype.

    Keeps only the mask, or the stream's state to redraw it from. The residual's gradient is the
    output's gradient, unchanged.
    """

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor | None,
        branch: Tensor,
        bias: Tensor | None,
        probability: float,
        skip_tail: bool,
        redraw: Redraw | None,
        kernels: Kernels,
    ) -> Tensor:
        ctx.branch_dtype, ctx.redraw, ctx.kernels = branch.dtype, redraw, kernels
        ctx.has_bias = bias is not None
        ctx.scale = keep_scale(probability, branch.device, kernels)
        added = [one for one in (residual, bias) if one is not None]
        dtype = branch.dtype if residual is None else residual.dtype
        output = branch
        if probability:
            # The state is read before the draw: backward draws the same numbers from it.
            state = None if redraw is None else redraw.rng.state()
            if skip_tail:
                mask = _draw_mask(branch.shape, dtype, branch.device, probability, kernels)
            elif _draws_itself(branch.device, kernels):
                output, mask = run(
                    kernels,
                    drop,
                    branch.to(dtype),
                    draw_numbers(branch.shape, branch.device),
                    *added,
                    probability=probability,
                    scale=ctx.scale,
                )
            else:
                output, mask = torch.native_dropout(
                    branch.to(dtype).contiguous(), probability, True
                )
                output = output if residual is None else output.add_(residual)
            ctx.save_for_backward(mask if redraw is None else state)
            if redraw is not None:
                redraw.made(mask)
        elif bias is not None and not skip_tail:
            output = run(kernels, add_biased, branch.to(dtype), *added)
        if skip_tail and residual is not None:
            # A view of the residual would hold it where no operation keeps it.
            return residual.new_empty(()).expand_as(residual)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Gradients:
        grad_branch, grad_bias = grad_output, None
        saved = ctx.saved_tensors  # read once: torch's checkpoint raises on a second read
        if saved:
            (kept,) = saved
            mask = kept if ctx.redraw is None else ctx.redraw.again(kept)
            sizes = dict(scale=ctx.scale, has_bias=ctx.has_bias)
            grads = run(ctx.kernels, drop_backward, grad_output, mask, **sizes)
            grad_branch, grad_bias = grads if ctx.has_bias else (grads, None)
        elif ctx.has_bias:
            grad_bias = grad_output.flatten(0, -2).sum(0)
        grad_residual = grad_output if ctx.needs_input_grad[0] else None
        return grad_residual, grad_branch.to(ctx.branch_dtype), grad_bias, None, None, None, None
