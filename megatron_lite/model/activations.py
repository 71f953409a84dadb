"""Activations of the MLP. They keep only their input.

Composed of torch's own operations they would keep one more tensor with f channels.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.compiled import Kernels, Pair, Tensors, applied, at_least_float32

aten = torch.ops.aten
INPUT = slice(0, 1)
A = (8.0 / math.pi) ** 0.5
B = 0.044715 * A


def tanh_gelu(intermediate: Tensor) -> Tensor:
    """Returns GELU by its tanh formula (arXiv 1606.08415), computed in float32 on a CPU.

    On a CPU it uses the identity 1 + tanh(x) = 2 sigmoid(2x), because torch's sigmoid is ten times
    faster there than its tanh. torch's own GELU kernel takes 1.5 times as long as this one.
    """
    if intermediate.device.type != "cpu":
        return F.gelu(intermediate, approximate="tanh")
    # x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)) = x sigmoid(x (A + B x^2))
    x = intermediate.to(at_least_float32(intermediate.dtype))
    output = (x * x).mul_(B).add_(A).mul_(x).sigmoid_().mul_(x)
    return output.to(intermediate.dtype)


def fused_tanh_gelu_backward(grad_output: Tensor, x: Tensor) -> Tensor:
    gate = torch.sigmoid(x * (A + B * x * x))
    # d(x gate)/dx, with d(gate)/dx = gate (1 - gate) (A + 3 B x^2)
    return grad_output * (gate * (1.0 + x * (1.0 - gate) * (A + 3.0 * B * x * x)))


def swiglu(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up (arXiv 2002.05202): [.., 2n] -> [.., n].

    gate_up: the gate's n channels, followed by those of up.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_backward(grad_output: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    # Both gradients are written into halves of one tensor, which saves a concatenation.
    grad = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    grad_gate, grad_up = grad.chunk(2, dim=-1)
    torch.mul(grad_output, F.silu(gate), out=grad_up)
    grad_gate.copy_(aten.silu_backward(grad_output * up, gate))
    return grad


def fused_swiglu_backward(grad_output: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    # silu'(x) = sigmoid(x) (1 + x (1 - sigmoid(x)))
    grad_gate = grad_output * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return torch.cat((grad_gate, grad_output * gate * sigmoid), dim=-1)


def geglu(gate_up: Tensor) -> Tensor:
    """Returns gelu(gate) * up by the tanh formula (arXiv 2002.05202): [.., 2n] -> [.., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return tanh_gelu(gate) * up


def geglu_backward(
    grad_output: Tensor, gate_up: Tensor, *, gelu_backward: Callable[..., Tensor]
) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.cat((gelu_backward(grad_output * up, gate), grad_output * tanh_gelu(gate)), -1)


def squared_relu(intermediate: Tensor) -> Tensor:
    """Returns relu(x)^2 (arXiv 2109.08668)."""
    positive = F.relu(intermediate)
    return positive.mul_(positive)  # torch's compiler has no square_


def squared_relu_backward(grad_output: Tensor, intermediate: Tensor) -> Tensor:
    return F.relu(intermediate).mul_(2.0).mul_(grad_output)


tanh_gelu_backward = partial(aten.gelu_backward, approximate="tanh")
TANH_GELU = Pair(tanh_gelu, tanh_gelu_backward, INPUT, fused_tanh_gelu_backward)
PAIRS = {
    "gelu": Pair(aten.gelu, aten.gelu_backward, INPUT),
    "swiglu": Pair(swiglu, swiglu_backward, INPUT, fused_swiglu_backward),
    "geglu": Pair(
        geglu,
        partial(geglu_backward, gelu_backward=tanh_gelu_backward),
        INPUT,
        partial(geglu_backward, gelu_backward=fused_tanh_gelu_backward),
    ),
    "squared_relu": Pair(squared_relu, squared_relu_backward, INPUT),
}


def with_bias(pair: Pair) -> Pair:
    """Returns the pair for the sum of its input and a bias, as compiled kernels compute it."""
    backward = pair.fused or pair.backward

    def biased(intermediate: Tensor, bias: Tensor) -> Any:
        return pair.forward(intermediate + bias)

    def biased_backward(grad_output: Tensor, intermediate: Tensor, bias: Tensor) -> Tensors:
        grad = backward(grad_output, intermediate + bias)
        return grad, grad.flatten(0, -2).sum(0)

    return Pair(biased, biased_backward, slice(0, 2))


# Made once: all layers share the graphs of a function.
BIASED = {id(pair): with_bias(pair) for pair in (*PAIRS.values(), TANH_GELU)}


def activation_function(config: ModelConfig, kernels: Kernels) -> Callable[..., Tensor]:
    """Returns the activation of the MLP: [.., fc1_blocks * f / t] -> [.., f / t].

    kernels: compiles the activation; None: torch's operators compute it. The function takes the
        bias of linear_fc1 as a second argument if a compiled kernel is to add it.
    """
    pair = activation_pair(config)
    if adds_bias(config, kernels):
        pair = BIASED[id(pair)]
    return partial(applied, pair, kernels=kernels)


def activation_pair(config: ModelConfig) -> Pair:
    """Returns the activation of the MLP as a forward and a backward."""
    if config.activation == "gelu" and config.bias_gelu_fusion:
        return TANH_GELU
    return PAIRS[config.activation]


def adds_bias(config: ModelConfig, kernels: Kernels) -> bool:
    """Returns whether the activation adds the bias of the linear layer before it."""
    return kernels is not None and config.add_bias_linear
