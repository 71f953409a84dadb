"""16-bit matrix products in float32, for processors where torch's own 16-bit ones are slow loops.

The product of two bf16 numbers is exact in float32. A sum is in float32, as in torch's products,
and is rounded once. So the result is as near to the exact one as torch's, and other low bits are
possible. Blocks of the operands are cast, so no operand exists in float32 as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.config.wide_blocks import LEAST_ROWS, block, even_rows
from megatron_lite.parallel import cpu_facts
from megatron_lite.parallel.fake_tensors import is_fake


def widens(x: Tensor, onednn: bool) -> bool:
    """Returns whether products of `x` are computed in float32.

    Those of tensors without values are not, so that a dry run has the same bytes on all machines.
    onednn: whether the run may replace torch's products (training/processor.py).
    """
    return (
        onednn
        and not torch.compiler.is_compiling()
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.device.type == "cpu"
        and cpu_facts.lacks_16_bit_products()
        and not is_fake(x)
    )


def wide_product(
    left: Tensor,
    right: Tensor,
    added: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """Returns alpha left right + beta added in the dtype of `left`, as torch.addmm does.

    left: [m, k]. right: [k, n]. added: [n] or [m, n]. All have 16 bits and lie on a CPU.
    """
    m, k = left.shape
    n = right.shape[1]
    result = left.new_empty((m, n))
    rows, columns = even_rows(m, k), min(n, block(k))
    held = max(rows, LEAST_ROWS)
    left_memory, right_memory, memory = (
        left.new_empty(elements, dtype=torch.float32)
        for elements in (held * k, columns * k, held * columns)
    )
    for column in range(0, n, columns or 1):
        part = slice(column, column + columns)
        wide_right = _cast(right[:, part], right_memory)
        for row in range(0, m, rows or 1):
            own = left[row : row + rows]
            cast = _cast if len(own) >= LEAST_ROWS else _padded
            wide_left = cast(own, left_memory)
            shape = wide_left.shape[0], wide_right.shape[1]
            product = memory[: shape[0] * shape[1]].view(shape)
            product = torch.mm(wide_left, wide_right, out=product)[: len(own)]
            if alpha != 1.0:
                product.mul_(alpha)
            if added is not None:
                of_block = added[part] if added.dim() == 1 else added[row : row + rows, part]
                product.add_(of_block.float(), alpha=beta)
            result[row : row + rows, part] = product
    return result


def _padded(x: Tensor, memory: Tensor) -> Tensor:
    """Returns x [a, b] in float32 and rows of zeros, [LEAST_ROWS, b]."""
    rows = memory[: LEAST_ROWS * x.shape[1]].view(LEAST_ROWS, -1 if x.shape[1] else 0)
    rows[: len(x)].copy_(x)
    rows[len(x) :].zero_()
    return rows


def _cast(x: Tensor, memory: Tensor) -> Tensor:
    """Returns x [a, b] in float32, in the order in which its elements lie in memory."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return memory[: x.numel()].view(x.shape).copy_(x)
    return memory[: x.numel()].view(x.shape[::-1]).copy_(x.t()).t()
