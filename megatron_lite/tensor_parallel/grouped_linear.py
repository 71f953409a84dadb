"""A linear layer for each group of rows: the experts of a mixture-of-experts layer.

    y = x A_e^T  for the rows of expert e       x [n, in], A [E, out, in], rows sorted by expert

torch's grouped product computes all experts in one call. It has no float64, its rows must be
multiples of 16 bytes, and not every torch has it for every device. Otherwise one matmul for each
expert does the same, and the host waits for the number of rows of each.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.parallel.collectives import results_may_be_kept
from megatron_lite.parallel.compiled import Gradients, Pair, applied
from megatron_lite.parallel.torch_internals import disable_current_modes, grouped_product, is_fake
from megatron_lite.parallel.weight_gradient import in_autocast_dtype

from .rank_context import RankContext

ROW_BYTES = 16


class GroupedLinear(nn.Module):
    """A linear layer for each expert: rows [n, input_size] -> [n, output_size].

    Weight [E, output_size, input_size], bias [E, output_size] or None, of which this rank has its
    experts. They are sharded over the experts' TP group along `tp_dim`: 1, the output features (in
    `tp_blocks` blocks), or 2, the input features. The result is partial then, and the first rank of
    the group alone adds the bias. Each rank computes its whole gradient.
    Issues no collective. Keeps the rows, the weight, `ends`, and with a bias its factors.
    """

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        tp_dim: int,
        bias: bool,
        init_std: float,
        context: RankContext,
        tp_blocks: int = 1,
    ) -> None:
        super().__init__()
        new = partial(
            context.new_parameter, num_experts, output_size, of_experts=True, tp_blocks=tp_blocks
        )
        self.weight = new(input_size, tp_dim=tp_dim, init_std=init_std)
        self.bias = new(tp_dim=1 if tp_dim == 1 else None) if bias else None
        self._adds_bias = tp_dim == 1 or (context.experts or context).tp_rank == 0

    def forward(
        self, rows: Tensor, ends: Tensor, skip_tail: bool = False, factors: Tensor | None = None
    ) -> Tensor:
        """Returns each row times the weight of its expert, plus its bias: [n, in] -> [n, out].

        rows: sorted by expert.
        ends: [E] int32, the number of rows of the experts up to and including each one.
        factors: [n], that on the bias of each row; None: 1.
        skip_tail: builds only the graph, for a replay whose output is never read (layers.py).
        """
        rows, weight = in_autocast_dtype(rows, self.weight)
        adds_bias = self._adds_bias

        def forward(rows: Tensor, weight: Tensor, ends: Tensor, *of_bias: Any) -> Tensor:
            multiply = products
            if results_may_be_kept():
                multiply = torch.ops.megatron_lite.grouped_product
            product = multiply(rows, weight.transpose(1, 2), ends)
            if not (of_bias and adds_bias):
                return product
            bias, factors = of_bias
            # A new tensor: a policy may keep the product.
            return _of_rows(bias, factors, ends, product).add_(product)

        def backward(
            grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor, *of_bias: Any
        ) -> Gradients:
            grad = grad.contiguous()
            of_bias_grads = _bias_gradients(grad, ends, adds_bias, *of_bias) if of_bias else ()
            grads = products(grad, weight, ends), outer_products(grad, rows, ends)
            return *grads, None, *of_bias_grads

        inputs = rows, weight, ends, *(() if self.bias is None else (self.bias, factors))
        unread = (len(rows), weight.shape[1]) if skip_tail else None
        return applied(Pair(forward, backward, slice(None)), *inputs, unread=unread)


def _bias_gradients(
    grad: Tensor, ends: Tensor, adds_bias: bool, bias: Tensor, factors: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    ones = grad.new_ones(grad.shape[0]) if factors is None else factors.to(grad.dtype)
    # as many equal columns as the grouped product takes
    columns = ones[:, None].expand(-1, ROW_BYTES // grad.element_size()).contiguous()
    grad_bias = outer_products(grad, columns, ends)[..., 0].to(bias.dtype)
    if factors is None or not adds_bias:
        return grad_bias, None
    grad_rows = grad * _of_rows(bias, None, ends, grad)
    return grad_bias, grad_rows.sum(-1, dtype=factors.dtype)


def _of_rows(bias: Tensor, factors: Tensor | None, ends: Tensor, like: Tensor) -> Tensor:
    """Returns the bias of each row's expert, times its factor, in the dtype of `like`."""
    numbers = torch.arange(len(like), dtype=ends.dtype, device=ends.device)
    rows = bias.to(like.dtype)[torch.searchsorted(ends, numbers, right=True)]
    return rows if factors is None else rows.mul_(factors.to(like.dtype)[:, None])


def products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Returns each group of rows times its matrix: [n, k] and [E, k, m] -> [n, m]."""
    if is_fake(rows):  # torch's fake product has bfloat16 alone
        return rows.new_empty(rows.shape[0], matrices.shape[-1])
    if _is_grouped(rows, matrices.shape[-1]):
        return grouped_product(rows, matrices, offs=ends)
    parts = zip(rows.tensor_split(ends[:-1].long().cpu()), matrices, strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


# As one operator, a policy keeps the same results whether or not torch has its product here.
_OPERATORS = torch.library.Library("megatron_lite", "FRAGMENT")
_OPERATORS.define("grouped_product(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")
_OPERATORS.impl("grouped_product", products, "CompositeExplicitAutograd")


def outer_products(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Returns left^T right of each group of rows: [n, k] and [n, m] -> [E, k, m].

    A group without rows gets zeros.
    """
    if is_fake(left):
        return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])
    if _is_grouped(left, right.shape[-1]):
        return grouped_product(left.t(), right, offs=ends)
    cuts = ends[:-1].long().cpu()
    pairs = zip(left.tensor_split(cuts), right.tensor_split(cuts), strict=True)
    return torch.stack([one.t() @ other for one, other in pairs])


def _is_grouped(rows: Tensor, width: int) -> bool:
    """Tells whether torch's grouped product takes rows of this width, and makes rows of `width`."""
    size = rows.element_size()
    return (
        rows.shape[0] > 0
        and rows.shape[-1] * size % ROW_BYTES == 0
        and width * size % ROW_BYTES == 0
        and has_grouped_product(rows.device, rows.dtype)
    )


@cache
def has_grouped_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Tells whether this torch has the grouped product for a dtype on a device, by a small try."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    with disable_current_modes(), torch.no_grad():
        one = torch.ones(16, 16, dtype=dtype, device=device)
        ends = torch.full((1,), 16, dtype=torch.int32, device=device)
        try:
            grouped_product(one, one.unsqueeze(0), offs=ends)
            grouped_product(one.t(), one, offs=ends)
        except (RuntimeError, TypeError, ValueError):  # NotImplementedError is a RuntimeError
            return False
    return True
