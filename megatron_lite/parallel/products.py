"""Sums of matrix products and of looked-up rows in float32.

On CUDA torch's addmm adds a product of 16-bit operands to the float32 sum as it is, unrounded. A
CPU has no such product: torch rounds it once and then adds it, so each micro-batch adds a rounded
gradient. Call the functions where autograd does not record, such as in an autograd Function's
backward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.row_blocks import product_rows


def add_weight_product_(total: Tensor, rows: Tensor, grad_rows: Tensor, *, first: bool) -> None:
    """Adds dy^T x to `total` [n, k], or overwrites it if `first`.

    rows: x [m, k]. grad_rows: dy [m, n], of the same dtype. A product that is rounded is computed
    some rows at a time, so that no tensor of a very large weight's size exists.
    """
    beta = 0 if first else 1  # with beta 0 the matmul does not read the total
    if rows.dtype == total.dtype:
        torch.addmm(total, grad_rows.t(), rows, beta=beta, out=total)
        return
    if adds_unrounded(rows.device, rows.dtype):
        torch.addmm(total, grad_rows.t(), rows, out_dtype=total.dtype, beta=beta, out=total)
        return
    count = product_rows(total.shape[1])
    for start in range(0, total.shape[0], count):
        part = slice(start, start + count)
        own = total[part]
        # No name holds the product, so it is freed before the next one. On a CPU torch casts it to
        # a tensor of its own before it adds.
        (own.copy_ if first else own.add_)(grad_rows[:, part].t().matmul(rows))


@functools.cache
def adds_unrounded(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether a product of this dtype is added to a float32 sum without being rounded.

    It then exists as no tensor of its own (config/row_blocks.py). On CUDA a small product is tried,
    since not every build of torch has it for a float32 sum.
    """
    if dtype == torch.float32:
        return True
    if device.type != "cuda":
        return False
    total = torch.zeros(16, 16, device=device)
    factor = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(total, factor.t(), factor, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def add_rows_(total: Tensor, ids: Tensor, rows: Tensor, *, first: bool) -> None:
    """Adds each row of `rows` [m, k] to the row of the float32 total [n, k] at its id of `ids` [m].

    The total is overwritten if `first`. The rows are added in their order, which on a CPU does not
    depend on the number of threads.
    """
    if first:
        total.zero_()
    total.index_add_(0, ids, rows.to(total.dtype))


def in_autocast_dtype(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Returns the tensors in the dtype that torch's own operators would cast them to.

    Call it if autocast is on. The casts are part of the graph. The first one must not be None.
    """
    assert tensors[0] is not None
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)
