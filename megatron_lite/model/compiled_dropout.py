"""The passes of a dropout on a CPU as compiled kernels. model/dropout.py draws the random numbers.

A mask is the comparison of an integer with a bound, so it has the same bits as without a compiler.
"""

from __future__ import annotations

import torch
from torch import Tensor


def drop(numbers: Tensor, tensor: Tensor, *, bound: int, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the tensor with dropout applied, and the bool mask of the kept elements.

    numbers: one 16-bit number for each element. Numbers below the bound drop their element.
    """
    mask = _mask(numbers, tensor, bound)
    return torch.where(mask, tensor * scale, 0.0).to(tensor.dtype).contiguous(), mask


def drop_and_add(
    numbers: Tensor, branch: Tensor, residual: Tensor, *, bound: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns residual + dropout(branch) in the residual's dtype, and the bool mask.

    numbers, bound: as in `drop`. All other tensors have one shape.
    """
    mask = _mask(numbers, branch, bound)
    wide = branch.to(torch.promote_types(residual.dtype, torch.float32))
    return (residual + torch.where(mask, wide * scale, 0.0)).to(residual.dtype).contiguous(), mask


def drop_gradient(grad_output: Tensor, mask: Tensor, *, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns the gradient of the dropped tensor, in `dtype`."""
    return torch.where(mask, grad_output * scale, 0.0).to(dtype).contiguous()


def _mask(numbers: Tensor, tensor: Tensor, bound: int) -> Tensor:
    return (numbers >= bound).view(tensor.shape)
