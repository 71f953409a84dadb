"""Dropout on a named RNG stream, with a mask of one byte per element on every device.

torch's own F.dropout keeps a mask in the tensor's dtype on the CPU, 2 or 4 times as large, and its bernoulli draws one number
at a time there: half of the time of a dropout. So the CPU has its own drawing, four 16-bit numbers from each 64-bit draw.
"""

from __future__ import annotations

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
