"""Causal attention on a CPU where torch's kernel is not called once: in blocks, or by products.

causal_blocks.py has the one way, for float32, and causal_products.py the other, for 16 bits. Both
return and keep what torch's flash kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.description.attention_products import attends_by_products
from megatron_lite.model.causal_blocks import (
    attend_in_blocks,
    attend_in_blocks_backward,
    attends_in_blocks,
)
from megatron_lite.model.causal_products import attend_by_products, attend_by_products_backward
from megatron_lite.parallel.collectives import results_may_be_kept


class Way(NamedTuple):
    """One way to compute attention.

    operator: its name among torch.ops.megatron_lite, under which an ops(attention) policy keeps the
        whole result.
    forward: (query, key, value, scale) -> (output, lse).
    backward: (grad_output, query, key, value, output, lse, scale) -> the three gradients.
    """

    operator: str
    forward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


IN_BLOCKS = Way("causal_attention", attend_in_blocks, attend_in_blocks_backward)
BY_PRODUCTS = Way("attention_by_products", attend_by_products, attend_by_products_backward)


def way_of_causal_attention(query: Tensor, *, onednn: bool) -> Way | None:
    """Returns the way for a query [s, b, a/t, d]; None if torch's kernel is called once.

    A compiled graph calls the kernel once: it cannot call a Function that looks for modes.

    onednn: the choice of the run (training/processor.py).
    """
    if torch.compiler.is_compiling():
        return None
    if attends_in_blocks(query):
        return IN_BLOCKS
    gains = attends_by_products(query.shape[0], query.dtype.itemsize, query.device.type)
    return BY_PRODUCTS if onednn and query.dtype.itemsize == 2 and gains else None


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, way: Way = IN_BLOCKS
) -> Tensor:
    """Causal attention: query [s, b, a/t, d], key and value [s, b, g/t, d] -> [s, b, a/t, d].

    The tensors are on a CPU. Keeps the arguments, the output and the log-sum-exp of each row,
    [b, a/t, s], as torch's own attention does. Issues no collective and draws no random number.
    Raises RuntimeError under create_graph.
    """
    return _CausalAttention.apply(query, key, value, scale, way)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, way: Way
    ) -> Tensor:
        # As one operator, an ops(attention) policy can keep the result of all blocks.
        function = (
            getattr(torch.ops.megatron_lite, way.operator) if results_may_be_kept() else way.forward
        )
        output, lse = function(query, key, value, scale)
        ctx.scale, ctx.way = scale, way
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.way.backward(grad_output.contiguous(), *ctx.saved_tensors, ctx.scale)
        return *grads, None, None


_OPERATORS = torch.library.Library("megatron_lite", "FRAGMENT")
for _way in (IN_BLOCKS, BY_PRODUCTS):
    _OPERATORS.define(
        f"{_way.operator}(Tensor query, Tensor key, Tensor value, float scale) -> (Tensor, Tensor)"
    )
    _OPERATORS.impl(_way.operator, _way.forward, "CompositeExplicitAutograd")
