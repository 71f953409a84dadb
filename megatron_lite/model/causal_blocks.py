"""Causal attention on a CPU, for one block of queries after the other.

torch's kernel for a CPU skips later keys in blocks of 512. In a sequence of 512 tokens it computes
all scores and hides half of them. This module calls the kernel once for each block of QUERY_BLOCK
queries, with the keys up to the block's last position. With n blocks that leaves (n + 1) / 2n of
the work. Longer sequences gain little or lose: the sums over the blocks cost more than the kernel's
own skipping leaves. docs/performance.md has the measurements.

The gradients of a key are summed over the blocks in the tensors' dtype. 16-bit tensors would be
rounded once for each block, so only float32 attention runs in blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.context_parallel.attention_kernels import (
    Attended,
    AttentionGradients,
    attend,
    attend_backward,
)
from megatron_lite.context_parallel.sharded_attention import heads_first, heads_last
from megatron_lite.description.sizes import query_blocks
from megatron_lite.parallel.collectives import results_may_be_kept


def attends_in_blocks(query: Tensor) -> bool:
    """Returns whether causal attention of this query [s, b, a/t, d] runs in several blocks.

    A compiled graph calls the kernel once: it cannot call a Function that looks for modes.
    """
    return not torch.compiler.is_compiling() and len(_blocks(query)) > 1


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Causal attention: query [s, b, a/t, d], key and value [s, b, g/t, d] -> [s, b, a/t, d].

    The tensors are float32 on a CPU. Keeps the arguments, the output and the log-sum-exp of each
    row, [b, a/t, s], as torch's own attention does. Issues no collective and draws no random
    number. Raises RuntimeError under create_graph.
    """
    return _CausalAttention.apply(query, key, value, scale)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # As one operator, an ops(attention) policy can keep the result of all blocks.
        function = (
            torch.ops.megatron_lite.causal_attention if results_may_be_kept() else _attend_blocks
        )
        output, lse = function(query, key, value, scale)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        inputs = _Inputs(query, key, value, ctx.scale)
        attended = Attended(output, lse)
        grad_output = grad_output.contiguous()
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        # The last block reads every key. Its gradients of keys and values become the sums.
        last, *others = reversed(_blocks(query))
        _, grad_key, grad_value = _block_backward(inputs, attended, grad_output, last, grad_query)
        for rows in others:
            _add_block_(inputs, attended, grad_output, rows, grad_query, (grad_key, grad_value))
        return grad_query, heads_last(grad_key), heads_last(grad_value), None


class _Inputs(NamedTuple):
    """The arguments of attention. query: [s, b, a/t, d]. key, value: [s, b, g/t, d]."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float

    def of_block(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the queries of a block and the keys and values that they read, heads first."""
        keys = slice(0, rows.stop)
        return (
            heads_first(self.query[rows]),
            heads_first(self.key[keys]),
            heads_first(self.value[keys]),
        )


def _attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the output [s, b, a/t, d] and the log-sum-exp of each row, [b, a/t, s]."""
    s, b, heads, _ = query.shape
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty((b, heads, s))
    for rows in _blocks(query):
        _write_block_(_Inputs(query, key, value, scale), rows, output, lse)
    return output, lse


def _write_block_(inputs: _Inputs, rows: slice, output: Tensor, lse: Tensor) -> None:
    # A function of its own: the block's result is freed before the next block begins.
    block = attend(
        *inputs.of_block(rows),
        causal=rows.start == 0,
        scale=inputs.scale,
        mask=_later_keys(inputs.query, rows),
    )
    output[rows] = heads_last(block.output)
    lse[:, :, rows] = block.lse


def _block_backward(
    inputs: _Inputs, attended: Attended, grad_output: Tensor, rows: slice, grad_query: Tensor
) -> AttentionGradients:
    """Writes a block's rows of grad_query. Returns the block's gradients, heads first."""
    grads = attend_backward(
        heads_first(grad_output[rows]),
        *inputs.of_block(rows),
        Attended(heads_first(attended.output[rows]), attended.lse[:, :, rows]),
        causal=rows.start == 0,
        scale=inputs.scale,
        mask=_later_keys(inputs.query, rows),
    )
    grad_query[rows] = heads_last(grads.query)
    return grads


def _add_block_(
    inputs: _Inputs,
    attended: Attended,
    grad_output: Tensor,
    rows: slice,
    grad_query: Tensor,
    totals: tuple[Tensor, Tensor],
) -> None:
    """Adds a block's gradients of keys and values to `totals`, [b, g/t, s, d] each."""
    grads = _block_backward(inputs, attended, grad_output, rows, grad_query)
    for total, part in zip(totals, grads[1:], strict=True):
        total[:, :, : rows.stop] += part


def _later_keys(query: Tensor, rows: slice) -> Tensor | None:
    """Returns the mask [n, m] of a block of n queries and the m keys up to its last position.

    The mask is -inf for keys after the query and else 0. The first block needs none.
    """
    if rows.start == 0:
        return None
    n = rows.stop - rows.start
    mask = query.new_zeros((n, rows.stop))
    mask[:, rows.start :] = query.new_full((n, n), -torch.inf).triu_(1)
    return mask


def _blocks(query: Tensor) -> list[slice]:
    return query_blocks(query.shape[0], query.dtype.itemsize, query.device.type)


# As one operator, a selective checkpoint can keep the result like that of a kernel.
_OPERATORS = torch.library.Library("megatron_lite", "FRAGMENT")
_OPERATORS.define(
    "causal_attention(Tensor query, Tensor key, Tensor value, float scale) -> (Tensor, Tensor)"
)
_OPERATORS.impl("causal_attention", _attend_blocks, "CompositeExplicitAutograd")
