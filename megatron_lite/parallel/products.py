"""The matrix products of linear layers, by torch's own choice or by a faster way on a CPU.

torch sends float32 products on an x86 processor to MKL. On AMD processors with AVX-512, oneDNN is
up to twice as fast for large products (docs/performance.md). torch contains both. 16-bit products
are slow loops without AVX-512; there they are computed in float32 (wide_products.py).

    product           operands                     by oneDNN
    y = x A^T + b     x [.., k], A [n, k], b [n]   in one call
    dx = dy A         dy [.., n], A [n, k]         in one call, A is read with its strides
    dA += dy^T x      dy [m, n], x [m, k]          in parts, with a transposed copy of a part of the
                                                   narrower operand: oneDNN reads its first operand
                                                   row by row

`onednn` of tensor_parallel/rank_context.py carries the choice of the run. A product of float32
operands on a CPU follows it if it has at least LEAST_MULTIPLICATIONS, and one of 16-bit operands
always. The rule reads only shapes, dtypes and devices, so a replay takes the path of the forward.
The three products of a layer have equally many multiplications, so all take the same path.

Each product is one operator of torch, so that modes see it: an `ops(..)` policy takes it for
aten.mm or aten.addmm (config/operators.py), and torch's FlopCounterMode has its formula. Call the
functions where autograd does not record, in an autograd Function. Under create_graph backward is
recorded, and torch's own products run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megatron_lite.config.large_products import COLUMNS, LEAST_MULTIPLICATIONS, ROWS, TOKENS
from megatron_lite.config.row_blocks import product_rows, rows_at_a_time
from megatron_lite.parallel.wide_products import wide_product, widens


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, onednn: bool) -> Tensor:
    """Returns x A^T plus the bias. x: [.., k]. weight: A [n, k]. bias: [n]."""
    if not replaces_torch(x, weight, onednn):
        return F.linear(x, weight, bias)
    operators = torch.ops.megatron_lite
    if bias is None:
        return operators.own_mm(x, weight.t())
    return operators.own_addmm(bias, x, weight.t())


def input_gradient(grad_output: Tensor, weight: Tensor, *, onednn: bool) -> Tensor:
    """Returns dy A. grad_output: dy [.., n]. weight: A [n, k]."""
    if not replaces_torch(grad_output, weight.t(), onednn):
        return grad_output.matmul(weight)
    return torch.ops.megatron_lite.own_mm(grad_output, weight)


def weight_product(rows: Tensor, grad_rows: Tensor, *, onednn: bool) -> Tensor:
    """Returns dy^T x, [n, k]. rows: x [m, k]. grad_rows: dy [m, n]."""
    if not replaces_torch(grad_rows.t(), rows.t(), onednn):
        return grad_rows.t().matmul(rows)
    if rows.dtype != torch.float32:
        return torch.ops.megatron_lite.own_mm(grad_rows.t(), rows)
    total = rows.new_empty((grad_rows.shape[1], rows.shape[1]))
    torch.ops.megatron_lite.onednn_add_weight_gradient_(total, rows, grad_rows, True)
    return total


def add_weight_product_(
    total: Tensor, rows: Tensor, grad_rows: Tensor, *, first: bool, onednn: bool
) -> None:
    """Adds dy^T x to `total` [n, k], or overwrites it if `first`.

    rows: x [m, k]. grad_rows: dy [m, n]. A 16-bit product is rounded once and then added to the
    float32 total, some rows at a time, so that no tensor of a large weight's size exists.
    """
    if rows.dtype != total.dtype:
        count = product_rows(total.shape[1], total.device.type)
        for start in range(0, total.shape[0], count):
            part = slice(start, start + count)
            product = weight_product(rows, grad_rows[:, part], onednn=onednn)
            add_rounded_(total[part], product, first=first)
            del product
        return
    if not by_onednn(grad_rows.t(), rows.t(), onednn):
        # with beta 0 the matmul does not read the total
        torch.addmm(total, grad_rows.t(), rows, beta=0 if first else 1, out=total)
        return
    torch.ops.megatron_lite.onednn_add_weight_gradient_(total, rows, grad_rows, first)


def add_rounded_(total: Tensor, product: Tensor, *, first: bool) -> None:
    """Adds a 16-bit product [n, k] to the float32 total, or overwrites it if `first`.

    On a CPU an addition of two dtypes casts all of its second operand to a tensor of its own.
    Therefore a few rows are cast at a time.
    """
    if total.device.type != "cpu":
        (total.copy_ if first else total.add_)(product)
        return
    count = rows_at_a_time(product.shape[1], "cpu")
    for start in range(0, product.shape[0], count):
        part = total[start : start + count]
        wide = product[start : start + count].to(total.dtype)
        (part.copy_ if first else part.add_)(wide)
        del wide


def add_rows_(total: Tensor, ids: Tensor, rows: Tensor, *, first: bool) -> None:
    """Adds each row of `rows` [m, k] to the row of the float32 total [n, k] at its id of `ids` [m].

    The total is overwritten if `first`. The rows are added in their order, which on a CPU does not
    depend on the number of threads. Of 16-bit rows some are cast at a time.
    """
    if first:
        total.zero_()
    count = rows_at_a_time(rows.shape[1], "cpu")
    for start in range(0, rows.shape[0], count):
        part = slice(start, start + count)
        total.index_add_(0, ids[part], rows[part].to(total.dtype))


def replaces_torch(left: Tensor, right: Tensor, onednn: bool) -> bool:
    """Returns whether left [.., k] times right^T, right [n, k], is not computed by torch's choice.

    If it is not, oneDNN or float32 products of casts compute it.
    """
    alike = left.dtype == right.dtype and left.device == right.device
    return by_onednn(left, right, onednn) or (alike and _is_free() and widens(left, onednn))


def by_onednn(left: Tensor, right: Tensor, onednn: bool) -> bool:
    """Returns whether oneDNN computes left [.., k] times right^T, right [n, k]."""
    return (
        onednn
        and left.numel() * right.shape[0] >= LEAST_MULTIPLICATIONS
        and left.dtype == right.dtype == torch.float32
        and left.device.type == right.device.type == "cpu"
        and _is_free()
    )


def _is_free() -> bool:
    """Returns whether nothing records or compiles the operators."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _call(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns left [.., k] times right [k, n] by oneDNN.

    torch copies `left` unless it is contiguous. oneDNN reads `right` with its strides, row by row
    or column by column. For a part of a wider matrix it has only its slow reference code, so such a
    part is copied first.
    """
    weight = right.t()
    if not weight.is_contiguous() and not right.is_contiguous():
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(left, weight, bias, "none", [], "")


def _mm(left: Tensor, right: Tensor) -> Tensor:
    return _call(left, right) if left.dtype == torch.float32 else _wide(left, right)


def _addmm(bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return _call(left, right, bias) if left.dtype == torch.float32 else _wide(left, right, bias)


def _wide(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns left [.., k] times right [k, n] of 16 bits, computed in float32."""
    product = wide_product(left.reshape(-1, left.shape[-1]), right, bias)
    return product.view(*left.shape[:-1], right.shape[1])


def _empty_mm(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[1]))


def _empty_addmm(bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return _empty_mm(left, right)


def _add_weight_gradient_(total: Tensor, rows: Tensor, grad_rows: Tensor, first: bool) -> None:
    """Adds dy^T x to `total` [n, k], for a part of the tokens, rows and columns at a time.

    The operand that is transposed is the narrower one. If it is x, oneDNN computes the transposed
    gradient x^T dy.
    """
    swapped = rows.shape[1] <= grad_rows.shape[1]
    narrow, wide = (rows, grad_rows) if swapped else (grad_rows, rows)
    result = total.t() if swapped else total  # [narrow, wide]
    for start in range(0, rows.shape[0], TOKENS):
        transposed = narrow[start : start + TOKENS].t().contiguous()
        for column in range(0, wide.shape[1], COLUMNS):
            right = wide[start : start + TOKENS, column : column + COLUMNS].contiguous()
            for row in range(0, transposed.shape[0], ROWS):
                part = result[row : row + ROWS, column : column + COLUMNS]
                # no name holds the product, so it is freed before the next one
                write_ = part.copy_ if first and start == 0 else part.add_
                write_(_call(transposed[row : row + ROWS], right))
            del right
        del transposed


def _no_result(total: Tensor, rows: Tensor, grad_rows: Tensor, first: bool) -> None:
    """The operator's kernel for tensors without data."""


_OPERATORS = torch.library.Library("megatron_lite", "FRAGMENT")
for _signature, _kernel, _without_data in (
    ("own_mm(Tensor left, Tensor right) -> Tensor", _mm, _empty_mm),
    ("own_addmm(Tensor bias, Tensor left, Tensor right) -> Tensor", _addmm, _empty_addmm),
    (
        "onednn_add_weight_gradient_(Tensor(a!) total, Tensor rows, Tensor grad_rows, bool first)"
        " -> ()",
        _add_weight_gradient_,
        _no_result,
    ),
):
    _name = _OPERATORS.define(_signature).split("::")[-1]
    _OPERATORS.impl(_name, _kernel, "CPU")
    _OPERATORS.impl(_name, _without_data, "Meta")


@register_flop_formula(torch.ops.megatron_lite.own_mm)
def _mm_flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * torch.Size(left).numel() * right[1]


@register_flop_formula(torch.ops.megatron_lite.own_addmm)
def _addmm_flops(
    bias: Sequence[int], left: Sequence[int], right: Sequence[int], *_: Any, **__: Any
) -> int:
    return _mm_flops(left, right)


@register_flop_formula(torch.ops.megatron_lite.onednn_add_weight_gradient_)
def _weight_flops(total: Sequence[int], rows: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * torch.Size(total).numel() * rows[0]
