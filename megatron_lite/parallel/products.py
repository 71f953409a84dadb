"""Sums of matrix products and of looked-up rows in float32.

A product of 16-bit operands is rounded once by torch and then added to the float32 sum, so each
micro-batch adds a rounded gradient. Call the functions where autograd does not record, such as in
an autograd Function's backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.config.row_blocks import product_rows


def add_weight_product_(total: Tensor, rows: Tensor, grad_rows: Tensor, *, first: bool) -> None:
    """Adds dy^T x to `total` [n, k], or overwrites it if `first`.

    rows: x [m, k]. grad_rows: dy [m, n]. A 16-bit product is computed some rows at a time, so that
    no tensor of a very large weight's size exists.
    """
    if rows.dtype == total.dtype:
        # with beta 0 the matmul does not read the total
        torch.addmm(total, grad_rows.t(), rows, beta=0 if first else 1, out=total)
        return
    count = product_rows(total.shape[1])
    for start in range(0, total.shape[0], count):
        part = slice(start, start + count)
        # no name holds the product, so it is freed before the next one
        add_rounded_(total[part], grad_rows[:, part].t().matmul(rows), first=first)


def add_rounded_(total: Tensor, product: Tensor, *, first: bool) -> None:
    """Adds a 16-bit product [n, k] to the float32 total, or overwrites it if `first`.

    On a CPU torch casts the product to a tensor of its own before it adds.
    """
    (total.copy_ if first else total.add_)(product)


def add_rows_(total: Tensor, ids: Tensor, rows: Tensor, *, first: bool) -> None:
    """Adds each row of `rows` [m, k] to the row of the float32 total [n, k] at its id of `ids` [m].

    The total is overwritten if `first`. The rows are added in their order, which on a CPU does not
    depend on the number of threads.
    """
    if first:
        total.zero_()
    total.index_add_(0, ids, rows.to(total.dtype))
