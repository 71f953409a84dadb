"""Adds weight gradients of linear layers to the float32 sums over micro-batches.

    path         who adds dy^T x to the sum                                needs
    apex         a kernel of NVIDIA apex adds it unrounded                 CUDA and apex
    addmm        torch's matmul adds it unrounded                          a float32 weight, or CUDA
    rounded      the layer's backward rounds it to 16 bits and adds it     torch with
                                                                           Tensor.grad_dtype
    grad_dtype   autograd rounds it to 16 bits and adds it                 the same
    hook         a hook of optim/grad_buffer.py adds the rounded one       any torch

On the first three paths no tensor of a large gradient's size exists besides the sum. Autograd would
cast a 16-bit gradient to float32, and would keep that of a tied embedding until the gradient of the
lookup has arrived.

The lookup of an embedding adds to the sum by itself too, whoever adds the gradient of the output
projection. On a CPU it adds one row for each token, in their order. On CUDA such a sum would have
another order each time. There the lookup of a 16-bit embedding adds a rounded tensor of the table's
size, and autograd adds that of a float32 one.

On CUDA torch's addmm adds a product of 16-bit operands to the float32 sum as it is, unrounded. A
CPU has no such product: torch rounds it once and then adds it, so each micro-batch adds a rounded
gradient.

Each weight has its own path. training/apex_kernels.py chooses it. The kernel writes while backward
is in the layer. Autograd runs a parameter's hooks after its whole gradient has arrived. A hook that
sends the sum to other ranks (--overlap-grad-reduce) therefore sends the kernel's result.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.config.row_blocks import product_rows

# (x [n, in], dy [n, out], total [out, in] float32): total += dy^T x. All tensors are contiguous; x
# and dy have the same dtype.
AccumulatingKernel = Callable[[Tensor, Tensor, Tensor], Any]
# (x [m, in], dy [m, out]): adds dy^T x to the float32 sum of one weight
OwnSum = Callable[[Tensor, Tensor], None]
ATTRIBUTE = "add_weight_gradient_"
LOOKUP_ATTRIBUTE = "add_lookup_gradient_"
ANY_ID = -1  # no id stands for padding


def accumulate_with_(
    kernel: AccumulatingKernel | None, parameter: nn.Parameter, total: Tensor
) -> None:
    """Makes backward add the gradient of a linear weight to its total.

    kernel: None for torch's addmm. On a CPU it rounds the gradients of 16-bit weights to 16 bits
        first. A total of 16 bits, which weights of 16 bits may have, is rounded at each addition.

    The kernel writes into the total, which becomes the parameter's `.grad`. If `.grad` is None, the
    total holds an earlier step's gradient, which does not count. Hooks that wait for a gradient run
    as always, once backward has left the layer: torch calls them even if a Function returns no
    gradient. If autograd has another part of the gradient (the lookup of a tied embedding), it adds
    that part to the same total.
    """
    is_wide = total.dtype == torch.float32
    setattr(parameter, ATTRIBUTE, partial(_add, kernel if is_wide else None, total))


def accumulate_lookup_(parameter: nn.Parameter, total: Tensor) -> None:
    """Makes the backward of a lookup add the gradient of a table to its float32 total, which
    becomes the table's `.grad`. On CUDA the table must have 16 bits."""
    setattr(parameter, LOOKUP_ATTRIBUTE, partial(_add_lookup, total))


def can_be_summed(dtype: torch.dtype) -> bool:
    """Returns whether a weight of this dtype can have the float32 `.grad` that the kernel needs."""
    return dtype == torch.float32 or (
        dtype in (torch.bfloat16, torch.float16) and hasattr(Tensor, "grad_dtype")
    )


def own_sum(weight: Tensor, attribute: str = ATTRIBUTE) -> OwnSum | None:
    """Returns f(x, dy) that adds dy^T x to the weight's float32 sum, or None if autograd
    accumulates.

    attribute: LOOKUP_ATTRIBUTE for f(ids, dy), which adds the gradient of a lookup. ids [..]: rows
        of the table. dy: the gradients of the rows that were looked up, [.., h].

    Call it in forward: saved-tensor hooks may give backward a different tensor object, without the
    attribute.
    """
    add = getattr(weight, attribute, None)
    return None if add is None else partial(add, weight)


def weight_gradient(
    add: OwnSum | None, hidden_states: Tensor, grad_output: Tensor
) -> Tensor | None:
    """Returns the gradient dy^T x of A in y = x A^T, [out, in].

    hidden_states: x, [.., in]. grad_output: dy, [.., out].
    add: the weight's `own_sum`. If it is given, the gradient is added to the weight's total, and
        the result is None.
    """
    rows, grad_rows = hidden_states.flatten(0, -2), grad_output.flatten(0, -2)
    if add is None:
        return grad_rows.t().matmul(rows)
    add(rows, grad_rows)
    return None


def _add_lookup(total: Tensor, parameter: nn.Parameter, ids: Tensor, grad_output: Tensor) -> None:
    is_first = parameter.grad is None
    if is_first:
        parameter.grad = total
    if total.device.type == "cpu":
        if is_first:
            total.zero_()
        # in their order, which does not depend on the number of threads
        total.index_add_(0, ids.flatten(), grad_output.flatten(0, -2).to(total.dtype))
        return
    table = torch.ops.aten.embedding_dense_backward(
        grad_output, ids, parameter.shape[0], ANY_ID, False
    )
    (total.copy_ if is_first else total.add_)(table)


def _add(
    kernel: AccumulatingKernel | None,
    total: Tensor,
    parameter: nn.Parameter,
    hidden_states: Tensor,
    grad_output: Tensor,
) -> None:
    is_first = parameter.grad is None
    if is_first:
        parameter.grad = total
    if kernel is None:
        add_weight_product_(total, hidden_states, grad_output, first=is_first)
        return
    if is_first:  # the kernel can only add, and the total holds an earlier step's gradient
        total.zero_()
    kernel(hidden_states.contiguous(), grad_output.contiguous(), total)


def add_weight_product_(total: Tensor, rows: Tensor, grad_rows: Tensor, *, first: bool) -> None:
    """Adds dy^T x to `total` [n, k], or overwrites it if `first`.

    rows: x [m, k]. grad_rows: dy [m, n], of the same dtype. A product that is rounded is computed
    some rows at a time, so that no tensor of a very large weight's size exists.
    """
    beta = 0 if first else 1  # with beta 0 the matmul does not read the total
    is_same = rows.dtype == total.dtype
    if is_same or adds_unrounded(rows.device, rows.dtype):
        wide: dict[str, Any] = {} if is_same else dict(out_dtype=total.dtype)
        torch.addmm(total, grad_rows.t(), rows, beta=beta, out=total, **wide)
        return
    count = product_rows(total.shape[1])
    for start in range(0, total.shape[0], count):
        part = slice(start, start + count)
        own = total[part]
        # No name holds the product, so it is freed before the next one. On a CPU torch casts it to
        # a tensor of its own before it adds.
        (own.copy_ if first else own.add_)(grad_rows[:, part].t().matmul(rows))


@cache
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


def in_autocast_dtype(*tensors: Any) -> tuple[Any, ...]:
    """Returns the tensors in the dtype that torch's own operators would cast them to.

    The casts are part of the graph. The first one must not be None.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)
