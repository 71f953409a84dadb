"""How weight gradients of linear layers reach the float32 gradients in which micro-batches are summed, for 16-bit weights.

    apex         a kernel of NVIDIA apex adds dy^T x, unrounded, to the float32 sum         on CUDA, where apex is installed
    grad_dtype   autograd takes dy^T x, rounded to 16 bits, and adds it to the float32 sum   torch that knows Tensor.grad_dtype
    hook         the same, by a hook of optim/grad_buffer.py                                 any torch

The package that is called apex on PyPI is another one: what is looked for is the extension module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# (x [n, in], dy [n, out], total [out, in] float32): total += dy^T x. All contiguous, x and dy of one dtype.
AccumulatingKernel = Callable[[Tensor, Tensor, Tensor], Any]
ATTRIBUTE = "add_weight_gradient_"


def apex_kernel(device: torch.device) -> AccumulatingKernel | None:
    """apex's kernel, where it can run."""
    if device.type != "cuda" or not hasattr(Tensor, "grad_dtype"):  # without it no 16-bit weight has a float32 `.grad`
        return None
    try:
        import fused_weight_gradient_mlp_cuda as apex
    except ImportError:
        return None
    kernel: AccumulatingKernel = apex.wgrad_gemm_accum_fp32
    return kernel


def accumulate_with_(kernel: AccumulatingKernel, totals: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """From now on backward adds the gradient of each of these linear weights to its float32 total by the kernel.

    The total becomes the parameter's `.grad`; one that is not yet counts as zero. Hooks that wait for a gradient run as always,
    once backward has left the layer: torch calls them also where a Function gives none.
    """
    for parameter, total in totals:
        assert total.dtype == torch.float32 and total.is_contiguous() and parameter.dtype.itemsize == 2
        setattr(parameter, ATTRIBUTE, partial(_add, kernel, total))


def own_sum(weight: Tensor) -> Callable[[Tensor, Tensor], None] | None:
    """What adds dy^T x of (x, dy) to the weight's total; None where autograd is to get the gradient.

    To be asked in forward: the weight that backward reads is another tensor where hooks look at what is saved.
    """
    add = getattr(weight, ATTRIBUTE, None)
    return None if add is None else partial(add, weight)


def weight_gradient(add: Callable[[Tensor, Tensor], None] | None, hidden_states: Tensor, grad_output: Tensor) -> Tensor | None:
    """dy^T x of y = x A^T: [out, in] from [.., in] and [.., out]. None where it is in the weight's total (add: its `own_sum`)."""
    rows, grad_rows = hidden_states.flatten(0, -2), grad_output.flatten(0, -2)
    if add is None:
        return grad_rows.t().matmul(rows)
    add(rows.contiguous(), grad_rows.contiguous())
    return None


def description(dtype: torch.dtype, *, fused: bool) -> str | None:
    """A line for the log; None for weights that are no 16-bit ones, whose gradients have their dtype."""
    if dtype.itemsize != 2:
        return None
    if fused:
        return "gradients of linear weights are added up in float32 by NVIDIA apex's kernel, others by autograd"
    how = "autograd (grad_dtype)" if hasattr(Tensor, "grad_dtype") else "a hook"
    return f"gradients are added up in float32 by {how}; each micro-batch's is rounded to 16 bits before"


def _add(kernel: AccumulatingKernel, total: Tensor, parameter: nn.Parameter, hidden_states: Tensor, grad_output: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = total.zero_()
    kernel(hidden_states, grad_output, total)
