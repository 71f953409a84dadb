"""Rotary position embedding by compiled kernels: one pass over the heads in each direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.parallel.compiled import CompiledKernels


def compiled_rotary(kernels: CompiledKernels, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns what model/rotary.py's apply_rotary returns, contiguous. Keeps the two tables.

    heads: [s, b, heads, d]. cos, sin: [s, 1, 1, rotary_dim].
    """
    result: Tensor = _Rotary.apply(heads, cos, sin, kernels)
    return result


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, kernels: CompiledKernels
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        rotated: Tensor = kernels(rotate, heads, cos, sin)
        return rotated

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.kernels(rotate_back, grad_output, *ctx.saved_tensors), None, None, None


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x cos + (-x2, x1) sin over the first channels of each head: [s, b, heads, d]."""
    wide, rest = _parts(heads, cos)
    first, second = wide.chunk(2, dim=-1)
    return _joined(wide * cos + torch.cat((-second, first), dim=-1) * sin, rest, heads)


def rotate_back(grad_output: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the gradient of `rotate` with respect to the heads, [s, b, heads, d]."""
    grad, rest = _parts(grad_output, cos)
    first, second = (grad * sin).chunk(2, dim=-1)
    # The transpose of (x1, x2) -> (-x2, x1) is (g1, g2) -> (g2, -g1).
    return _joined(grad * cos + torch.cat((second, -first), dim=-1), rest, grad_output)


def _parts(heads: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    return wide[..., : cos.shape[-1]], wide[..., cos.shape[-1] :]


def _joined(rotated: Tensor, rest: Tensor, like: Tensor) -> Tensor:
    whole = torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
    return whole.to(like.dtype).contiguous()
