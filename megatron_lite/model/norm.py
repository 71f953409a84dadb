"""LayerNorm and RMSNorm over the last dim."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.tensor_parallel.context import TensorParallelContext
from megatron_lite.tensor_parallel.layers import new_parameter


class Norm(nn.Module):
    """[..., n] -> [..., n]. Weight [n], and for LayerNorm bias [n], whole on every TP rank.

    partial_grad: each TP rank sees other tokens (sequence parallelism) or other heads (qk-layernorm), so that the
    parameter's gradient is the sum over the ranks. Keeps the input and its statistics.
    """

    def __init__(self, size: int, config: ModelConfig, context: TensorParallelContext, *, partial_grad: bool) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.weight = new_parameter(ParameterSpec(global_shape=(size,), init_value=1.0, sum_grad_over_tp=partial_grad), context)
        self.bias = new_parameter(ParameterSpec(global_shape=(size,), sum_grad_over_tp=partial_grad),
                                  context) if config.normalization == "LayerNorm" else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(hidden_states, self.weight, self.epsilon)
        return F.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, self.epsilon)


def rms_norm(hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight over the last dim (arXiv 1910.07467), in float32 inside. Keeps x and one statistic per row.

    torch has a fused kernel for CUDA; on a CPU it composes one that keeps four tensors and is ten times slower in backward.
    """
    if hidden_states.device.type == "cpu":
        return _CpuRMSNorm.apply(hidden_states, weight, epsilon)
    return F.rms_norm(hidden_states, weight.shape, weight, epsilon)


class _CpuRMSNorm(torch.autograd.Function):
    """A block of rows at a time, so that what is in float32 stays in the cache."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows, dtype = hidden_states.reshape(-1, hidden_states.shape[-1]), torch.promote_types(hidden_states.dtype, torch.float32)
        output = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        output_rows, scale = output.view(rows.shape), rows.new_empty((rows.shape[0], 1), dtype=dtype)
        for block in _blocks(rows):
            x = rows[block].to(dtype)
            torch.rsqrt(x.square().mean(-1, keepdim=True).add_(epsilon), out=scale[block])
            output_rows[block] = (x * scale[block]).mul_(weight)
        ctx.save_for_backward(hidden_states, weight, scale)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_states, weight, scale = ctx.saved_tensors
        rows, grad_rows = (x.reshape(-1, x.shape[-1]) for x in (hidden_states, grad_output))
        grad_input = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        grad_input_rows, grad_weight = grad_input.view(rows.shape), torch.zeros_like(weight, dtype=scale.dtype)
        for block in _blocks(rows):
            grad, normed = grad_rows[block].to(scale.dtype), rows[block] * scale[block]
            grad_normed = grad * weight
            grad_weight += (grad * normed).sum(0)
            mean = (grad_normed * normed).mean(-1, keepdim=True)
            grad_input_rows[block] = grad_normed.sub_(normed.mul_(mean)).mul_(scale[block])
        return grad_input, grad_weight.to(weight.dtype), None


def _blocks(rows: Tensor) -> list[slice]:
    """Ranges of about 64 Ki elements: 256 KiB in float32."""
    step = max(1, 2**16 // rows.shape[-1])
    return [slice(start, start + step) for start in range(0, rows.shape[0], step)]
