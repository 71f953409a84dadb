"""Runs pure functions of tensors: by torch's operators one by one, or as a compiled kernel.

A norm, an activation or a rotation is a pair of pure functions, its forward and its backward. One
autograd Function calls the pair. It decides what is kept for backward, so a compiled run keeps the
same tensors.

Eager operators compute in the dtype of their operands. A compiled kernel computes in float32
(float64) and rounds its results once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.parallel.compiled import CompiledKernels

Function = Callable[..., Any]


class Pair(NamedTuple):
    """A differentiable function as two pure functions.

    forward: (inputs) -> the output, or a tuple of the output and statistics for backward.
    backward: (gradient of the output, kept inputs, statistics) -> the gradient of the first input,
        or a tuple of the gradients of the first inputs.
    kept: which inputs are kept for backward. All statistics are.
    fused: the formula of the backward for compiled kernels, where the operators that are fast one
        by one are slower or less exact as one kernel.
    """

    forward: Function
    backward: Function
    kept: slice
    fused: Function | None = None


def applied(pair: Pair, kernels: CompiledKernels | None, *inputs: Tensor, **constants: Any) -> Any:
    """Returns the output of the pair's forward; autograd will call its backward.

    kernels: the compiled kernels. None: torch's operators.
    constants: further arguments of the forward, which are no tensors.
    """
    return _Applied.apply(pair, kernels, constants, *inputs)


class _Applied(torch.autograd.Function):
    """A pair of pure functions."""

    @staticmethod
    def forward(
        ctx: Any, pair: Pair, kernels: CompiledKernels | None, constants: Any, *inputs: Tensor
    ) -> Tensor:
        results = run(kernels, pair.forward, *inputs, **constants)
        output, *statistics = _as_tuple(results)
        ctx.save_for_backward(*inputs[pair.kept], *statistics)
        ctx.backward_function = pair.backward
        if kernels is not None and pair.fused is not None:
            ctx.backward_function = pair.fused
        ctx.kernels, ctx.num_inputs = kernels, len(inputs)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = _as_tuple(run(ctx.kernels, ctx.backward_function, grad_output, *ctx.saved_tensors))
        return None, None, None, *grads, *[None] * (ctx.num_inputs - len(grads))


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def run(
    kernels: CompiledKernels | None, function: Function, *tensors: Tensor, **constants: Any
) -> Any:
    """Returns `function(*tensors, **constants)`, from a compiled kernel if there are kernels."""
    if kernels is None:
        return function(*tensors, **constants)
    return kernels(_in_float32(function), *tensors, **constants)


@cache  # the function is a part of the key of a compiled graph
def _in_float32(function: Function) -> Function:
    """Returns the function with its arithmetic in float32 (float64).

    The first result, and every gradient, has the dtype of the first argument. Statistics stay wide.
    """

    def wide(*tensors: Tensor, **constants: Any) -> Any:
        output, *others = _as_tuple(function(*map(_widened, tensors), **constants))
        output = output.to(tensors[0].dtype).contiguous()
        return (output, *others) if others else output

    return wide


def _widened(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
