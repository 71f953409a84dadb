"""LayerNorm and RMSNorm over the last dim."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.checks import chosen
from megatron_lite.config.model import ModelConfig
from megatron_lite.model.compiled_norm import compiled_layer_norm, compiled_rms_norm
from megatron_lite.parallel import apex
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.tensor_parallel.layers import new_parameter
from megatron_lite.tensor_parallel.rank_context import RankContext


class Norm(nn.Module):
    """LayerNorm or RMSNorm: [..., n] -> [..., n]. Weight [n], and for LayerNorm a bias [n].

    Both parameters are whole on every TP rank.
    partial_grad: each TP rank sees other tokens (sequence parallelism) or other heads
        (qk-layernorm). The parameter's gradient is then the sum over the ranks.
    Keeps the input and its statistics, and under --apply-layernorm-1p the tensor 1 + weight, which
    has the weight's dtype. NVIDIA apex's kernel (--norm-impl apex) keeps statistics of
    at least float32, and a contiguous copy of an input that is not contiguous.
    reads_residual: whether the input is the residual stream. Under --fp32-residual-connection the
        norm runs in float32 then, keeps its parameters in float32, and returns their dtype.
    InputError: the flags ask for apex, and it has no kernel that can run.
    """

    def __init__(
        self,
        size: int,
        config: ModelConfig,
        context: RankContext,
        *,
        partial_grad: bool,
        reads_residual: bool = False,
    ) -> None:
        super().__init__()
        self.normalize = (
            chosen("--norm-impl", config.norm_impl, IMPLEMENTATIONS)(config, context.device.type)
            if context.kernels is None
            else partial(
                chosen("--normalization", config.normalization, COMPILED_NORMS), context.kernels
            )
        )
        self.epsilon = config.norm_epsilon
        self.shifts = config.apply_layernorm_1p
        self.widens = reads_residual and config.fp32_residual_connection
        self.weight = new_parameter(
            ParameterSpec(
                global_shape=(size,),
                init_value=0.0 if self.shifts else 1.0,
                sum_grad_over_tp=partial_grad,
            ),
            context,
        )
        bias_spec = ParameterSpec(global_shape=(size,), sum_grad_over_tp=partial_grad)
        self.bias = new_parameter(bias_spec, context) if config.norm_vectors == 2 else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.widens:
            weight = weight.to(hidden_states.dtype)
            bias = None if bias is None else bias.to(hidden_states.dtype)
        if self.shifts:
            weight = weight + 1
        output = self.normalize(hidden_states, weight, bias, self.epsilon)
        return output.to(self.weight.dtype) if self.widens else output


def rms_norm(hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Returns x / rms(x) * weight over the last dim (arXiv 1910.07467), computed in float32.

    hidden_states: x, [.., n]. weight: [n]. Keeps x and one statistic per row. torch has a fused
    kernel for CUDA. On a CPU torch composes the norm from operations that keep four tensors.
    """
    if hidden_states.device.type == "cpu":
        return _CpuRMSNorm.apply(hidden_states, weight, epsilon)
    return F.rms_norm(hidden_states, weight.shape, weight, epsilon)


class _CpuRMSNorm(torch.autograd.Function):
    """RMSNorm by torch's operators, with the arithmetic in float32 and its results in x's dtype."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        x = rows.to(torch.promote_types(rows.dtype, torch.float32))
        scale = x.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden_states, weight, scale)
        return (x * scale).mul_(weight).to(rows.dtype).view(hidden_states.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_states, weight, scale = ctx.saved_tensors
        rows, grad_rows = (x.reshape(-1, x.shape[-1]) for x in (hidden_states, grad_output))
        # With n = x * scale and g = dy * weight: dx = scale (g - n mean(g n)), dweight = sum(dy n).
        grad, normed = grad_rows.to(scale.dtype), rows * scale
        grad_normed = grad * weight
        grad_weight = (grad * normed).sum(0)
        mean = (grad_normed * normed).mean(-1, keepdim=True)
        grad_input = grad_normed.sub_(normed.mul_(mean)).mul_(scale).to(rows.dtype)
        return grad_input.view(hidden_states.shape), grad_weight.to(weight.dtype), None


def _layer_norm(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> Tensor:
    return F.layer_norm(hidden_states, weight.shape, weight, bias, epsilon)


def _rms_norm(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    assert bias is None
    return rms_norm(hidden_states, weight, epsilon)


# of the input, weight, bias if the norm has one, epsilon
Function = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
NORMS: dict[str, Function] = {"LayerNorm": _layer_norm, "RMSNorm": _rms_norm}
COMPILED_NORMS = {"LayerNorm": compiled_layer_norm, "RMSNorm": compiled_rms_norm}
APEX_NORMS = {"LayerNorm": apex.layer_norm, "RMSNorm": apex.rms_norm}


def torch_norm(config: ModelConfig, device_type: str) -> Function:
    """Returns the norm by torch's kernels."""
    return chosen("--normalization", config.normalization, NORMS)


def apex_norm(config: ModelConfig, device_type: str) -> Function:
    """Returns the norm by NVIDIA apex's kernel. InputError: the kernel cannot run here."""
    kernel = apex.require(
        chosen("--normalization", config.normalization, APEX_NORMS)(device_type), "--norm-impl"
    ).apply

    def normalize(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
    ) -> Tensor:
        affine = (weight,) if bias is None else (weight, bias)
        output: Tensor = kernel(hidden_states, *affine, weight.shape, epsilon)
        return output

    return normalize


IMPLEMENTATIONS = {"torch": torch_norm, "apex": apex_norm}
