"""LayerNorm and RMSNorm by compiled kernels, with the arithmetic in float32 (float64).

They keep what the eager norms keep: the input, the parameters and the statistics of each row.
LayerNorm's statistics are float32 here also on a CPU, where torch's kernel rounds them to the dtype
of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.parallel.compiled import CompiledKernels


def compiled_layer_norm(
    kernels: CompiledKernels,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
) -> Tensor:
    """Returns LayerNorm over the last dim: [.., n] -> [.., n]. Keeps two numbers for each row."""
    return _LayerNorm.apply(hidden_states, weight, bias, epsilon, kernels)


def compiled_rms_norm(
    kernels: CompiledKernels,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
) -> Tensor:
    """Returns RMSNorm over the last dim: [.., n] -> [.., n]. Keeps one number for each row."""
    assert bias is None
    return _RMSNorm.apply(hidden_states, weight, epsilon, kernels)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor,
        epsilon: float,
        kernels: CompiledKernels,
    ) -> Tensor:
        output, mean, scale = kernels(layer_norm, hidden_states, weight, bias, epsilon=epsilon)
        ctx.save_for_backward(hidden_states, weight, mean, scale)
        ctx.kernels = kernels
        result: Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.kernels(layer_norm_backward, grad_output, *ctx.saved_tensors), None, None)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_states: Tensor, weight: Tensor, epsilon: float, kernels: CompiledKernels
    ) -> Tensor:
        output, scale = kernels(rms_norm, hidden_states, weight, epsilon=epsilon)
        ctx.save_for_backward(hidden_states, weight, scale)
        ctx.kernels = kernels
        result: Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.kernels(rms_norm_backward, grad_output, *ctx.saved_tensors), None, None)


def layer_norm(
    hidden_states: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output, and for each row the mean and 1 / deviation, [.., 1] each."""
    x = _wide(hidden_states)
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    scale = (centred.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return _contiguous(centred * scale * weight + bias, hidden_states), mean, scale


def layer_norm_backward(
    grad_output: Tensor, hidden_states: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the input [.., n], the weight [n] and the bias [n].

    mean, scale: [.., 1], as `layer_norm` returns them.
    """
    grad, normed = _wide(grad_output), (_wide(hidden_states) - mean) * scale
    grad_normed = grad * weight
    # With n the normed row and g = dy w: dx = scale (g - mean(g) - n mean(g n)).
    grad_input = scale * (
        grad_normed
        - grad_normed.mean(-1, keepdim=True)
        - normed * (grad_normed * normed).mean(-1, keepdim=True)
    )
    return (
        _contiguous(grad_input, hidden_states),
        _over_rows(grad * normed, weight),
        _over_rows(grad, weight),
    )


def rms_norm(hidden_states: Tensor, weight: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns the output [.., n], and 1 / rms of each row, [.., 1]."""
    x = _wide(hidden_states)
    scale = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return _contiguous(x * scale * weight, hidden_states), scale


def rms_norm_backward(
    grad_output: Tensor, hidden_states: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the input [.., n] and of the weight [n]. scale: [.., 1]."""
    grad, normed = _wide(grad_output), _wide(hidden_states) * scale
    grad_normed = grad * weight
    # The formula of `layer_norm_backward` without mean(g), since rows are not centred.
    grad_input = scale * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    return _contiguous(grad_input, hidden_states), _over_rows(grad * normed, weight)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _contiguous(result: Tensor, like: Tensor) -> Tensor:
    return result.to(like.dtype).contiguous()


def _over_rows(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient.flatten(0, -2).sum(0).to(weight.dtype)
