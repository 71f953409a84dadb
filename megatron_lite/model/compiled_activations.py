"""Activations of the MLP by compiled kernels. Like the eager ones, they keep only their input.

The arithmetic is float32 (float64), and the result is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.parallel.compiled import CompiledKernels


class Formulas(NamedTuple):
    """An activation as two pure functions.

    forward: the input -> the output.
    backward: the output's gradient, the input -> the input's gradient.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def compiled_activation(kernels: CompiledKernels, formulas: Formulas) -> Callable[[Tensor], Tensor]:
    """Returns the activation [.., fc1_blocks * f / t] -> [.., f / t]. It keeps its input."""

    def activation(intermediate: Tensor) -> Tensor:
        result: Tensor = _Activation.apply(intermediate, formulas, kernels)
        return result

    return activation


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, intermediate: Tensor, formulas: Formulas, kernels: CompiledKernels
    ) -> Tensor:
        ctx.save_for_backward(intermediate)
        ctx.formulas, ctx.kernels = formulas, kernels
        output: Tensor = kernels(formulas.forward, intermediate)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (intermediate,) = ctx.saved_tensors
        return ctx.kernels(ctx.formulas.backward, grad_output, intermediate), None, None


# 1 + tanh(u) = 2 sigmoid(2u): a sigmoid costs less than a tanh. gelu(x) = x sigmoid(x (A + B x^2)).
A = (8.0 / math.pi) ** 0.5
B = 0.044715 * A


def tanh_gelu(intermediate: Tensor) -> Tensor:
    x = _wide(intermediate)
    return _contiguous(x * torch.sigmoid(x * (A + B * x * x)), intermediate)


def tanh_gelu_backward(grad_output: Tensor, intermediate: Tensor) -> Tensor:
    x = _wide(intermediate)
    gate = torch.sigmoid(x * (A + B * x * x))
    # d(x gate)/dx, with d(gate)/dx = gate (1 - gate) (A + 3 B x^2)
    slope = gate * (1.0 + x * (1.0 - gate) * (A + 3.0 * B * x * x))
    return _contiguous(_wide(grad_output) * slope, intermediate)


def erf_gelu(intermediate: Tensor) -> Tensor:
    x = _wide(intermediate)
    return _contiguous(x * _normal_cdf(x), intermediate)


def erf_gelu_backward(grad_output: Tensor, intermediate: Tensor) -> Tensor:
    x = _wide(intermediate)
    density = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    # d(x cdf(x))/dx = cdf(x) + x density(x)
    return _contiguous(_wide(grad_output) * (_normal_cdf(x) + x * density), intermediate)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return _contiguous(gate * torch.sigmoid(gate) * up, gate_up)


def swiglu_backward(grad_output: Tensor, gate_up: Tensor) -> Tensor:
    grad = _wide(grad_output)
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    # silu'(x) = sigmoid(x) (1 + x (1 - sigmoid(x)))
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return torch.cat((grad_gate, grad * gate * sigmoid), dim=-1).to(gate_up.dtype)


def squared_relu(intermediate: Tensor) -> Tensor:
    return _contiguous(_wide(intermediate).relu().square(), intermediate)


def squared_relu_backward(grad_output: Tensor, intermediate: Tensor) -> Tensor:
    return _contiguous(2.0 * _wide(intermediate).relu() * _wide(grad_output), intermediate)


TANH_GELU = Formulas(tanh_gelu, tanh_gelu_backward)
ERF_GELU = Formulas(erf_gelu, erf_gelu_backward)
SWIGLU = Formulas(swiglu, swiglu_backward)
SQUARED_RELU = Formulas(squared_relu, squared_relu_backward)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _contiguous(result: Tensor, like: Tensor) -> Tensor:
    return result.to(like.dtype).contiguous()
