"""Activations of the MLP that keep only their input.

Composed of torch's own operations they would keep one more tensor with f channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.config.checks import chosen
from megatron_lite.config.model import ModelConfig
from megatron_lite.model.compiled_activations import (
    ERF_GELU,
    SQUARED_RELU,
    SWIGLU,
    TANH_GELU,
    compiled_activation,
)
from megatron_lite.parallel.compiled import CompiledKernels


def tanh_gelu(intermediate: Tensor) -> Tensor:
    """Returns GELU by its tanh formula (arXiv 1606.08415), element by element: [.., n] -> [.., n].

    Keeps the input. On a CPU it uses the identity 1 + tanh(x) = 2 sigmoid(2x), because torch's
    sigmoid is ten times faster there than its tanh. torch's own GELU kernel takes 1.5 times as long
    as this one.
    """
    if intermediate.device.type == "cpu":
        return _CpuTanhGELU.apply(intermediate)
    return F.gelu(intermediate, approximate="tanh")


def swiglu(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up (arXiv 2002.05202): [.., 2n] -> [.., n]. Keeps gate_up.

    gate_up: the gate's n channels, followed by those of up.
    """
    return _SwiGLU.apply(gate_up)


def squared_relu(intermediate: Tensor) -> Tensor:
    """Returns relu(x)^2 (arXiv 2109.08668), element by element: [.., n] -> [.., n].

    Keeps the input.
    """
    return _SquaredReLU.apply(intermediate)


class _CpuTanhGELU(torch.autograd.Function):
    """x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), computed in float32."""

    @staticmethod
    def forward(ctx: Any, intermediate: Tensor) -> Tensor:
        ctx.save_for_backward(intermediate)
        slope = (8.0 / math.pi) ** 0.5
        x = intermediate.to(torch.promote_types(intermediate.dtype, torch.float32))
        output = (x * x).mul_(0.044715 * slope).add_(slope).mul_(x).sigmoid_().mul_(x)
        return output.to(intermediate.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (intermediate,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(grad_output, intermediate, approximate="tanh")


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        # Both gradients are written into halves of one tensor, which saves a concatenation.
        grad = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(grad_output, F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad_output * up, gate))
        return grad


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, intermediate: Tensor) -> Tensor:
        ctx.save_for_backward(intermediate)
        return F.relu(intermediate).square_()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (intermediate,) = ctx.saved_tensors
        return F.relu(intermediate).mul_(2.0).mul_(grad_output)


def activation_function(
    config: ModelConfig, kernels: CompiledKernels | None = None
) -> Callable[[Tensor], Tensor]:
    """Returns the activation of the MLP: [.., fc1_blocks * f / t] -> [.., f / t].

    kernels: compiles the activation; None: torch's operators compute it.
    """
    if kernels is not None:
        formulas = {
            "gelu": TANH_GELU if config.bias_gelu_fusion else ERF_GELU,
            "swiglu": SWIGLU,
            "squared_relu": SQUARED_RELU,
        }
        return compiled_activation(kernels, chosen("the activation", config.activation, formulas))
    return chosen(
        "the activation",
        config.activation,
        {
            "gelu": tanh_gelu if config.bias_gelu_fusion else F.gelu,
            "swiglu": swiglu,
            "squared_relu": squared_relu,
        },
    )
