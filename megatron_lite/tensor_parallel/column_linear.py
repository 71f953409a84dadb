"""The matmul of a column-parallel layer, with a handwritten backward.

The backward lets the layer keep less, and overlaps collectives with matmuls.

    sequence parallel   forward    gather x [s/t] -> [s],  y = x A^T    keeps this rank's [s/t] of x
                        backward   gather x again     ||  dx = dy A,  then
                                   reduce-scatter dx  ||  dA = dy^T x
    else                backward   dx = dy A,  then
                                   all-reduce dx      ||  dA = dy^T x

`||`: the collective runs beside the matmul. The gathered input is not stored (2205.05198 sec.
4.2.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import (
    all_gather_first_dim,
    start_all_gather_first_dim,
    start_all_reduce_,
    start_reduce_scatter_first_dim,
)
from megatron_lite.parallel.weight_gradient import OwnSum, own_sum, weight_gradient


def column_parallel_linear(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    tp_group: ProcessGroup | None,
    sequence_parallel: bool,
) -> Tensor:
    """Returns x A^T plus the bias: this rank's output features of all tokens, [s, b, m/t].

    hidden_states: [s, b, n], under sequence parallelism [s/t, b, n]. weight: [m/t, n]. bias: [m/t].
    Collectives are in the module's table; a group of None issues none. Keeps hidden_states and the
    weight.
    """
    add = own_sum(weight)
    if tp_group is None and add is None:
        return F.linear(hidden_states, weight, bias)
    return _ColumnParallelMatmul.apply(
        *autocast_operands(hidden_states, weight, bias), tp_group, sequence_parallel, add
    )


class Operands(NamedTuple):
    """The operands of a linear layer."""

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None


def autocast_operands(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Operands:
    """Returns the operands in autocast's dtype if autocast is on, as F.linear would cast them.

    hidden_states: [.., n]. weight: [m, n]. bias: [m]. The casts are part of the graph.
    """
    kind = hidden_states.device.type
    if not torch.is_autocast_enabled(kind):
        return Operands(hidden_states, weight, bias)
    dtype = torch.get_autocast_dtype(kind)
    return Operands(
        hidden_states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    )


class _ColumnParallelMatmul(torch.autograd.Function):
    """x [s/t or s, b, n] -> y [s, b, m/t], with the collectives of the module's table."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tp_group: ProcessGroup | None,
        sequence_parallel: bool,
        add: OwnSum | None,
    ) -> Tensor:
        ctx.tp_group, ctx.sequence_parallel, ctx.add = tp_group, sequence_parallel, add
        ctx.save_for_backward(hidden_states, weight)
        whole = (
            all_gather_first_dim(hidden_states, tp_group) if sequence_parallel else hidden_states
        )
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # dx comes first: the gather of x runs beside this matmul, and dx is on its way to the other
        # ranks while dA is computed.
        gather = None
        if needs_weight and ctx.sequence_parallel:
            gather = start_all_gather_first_dim(hidden_states, ctx.tp_group)
        grad_whole = grad_output.matmul(weight) if needs_input else None
        whole = hidden_states if gather is None else gather.wait()
        reduction = None
        if grad_whole is not None:
            start = start_reduce_scatter_first_dim if ctx.sequence_parallel else start_all_reduce_
            reduction = start(grad_whole, ctx.tp_group)
        grad_weight = weight_gradient(ctx.add, whole, grad_output) if needs_weight else None
        grad_bias = grad_output.flatten(0, -2).sum(0) if needs_bias else None
        # The wait comes last, so that dA and the bias's gradient are computed beside the reduction.
        grad_input = None if reduction is None else reduction.wait()
        return grad_input, grad_weight, grad_bias, None, None, None
