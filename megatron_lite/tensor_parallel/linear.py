"""The matmuls of column- and row-parallel layers, each with a handwritten backward.

The backward lets a layer keep less, and overlaps collectives with matmuls. `||` means that a
collective runs beside a matmul.

    column-parallel: y = x A^T, A split by output rows
        sequence parallel   forward    gather x [s/t] -> [s],  y = x A^T    keeps the [s/t] of x
                            backward   gather x again     ||  dx = dy A,  then
                                       reduce-scatter dx  ||  dA = dy^T x
        else                backward   dx = dy A,  then
                                       all-reduce dx      ||  dA = dy^T x

    row-parallel: y = sum over the ranks of x A^T, plus b; A split by input columns
        forward    partial = x A^T,  all-reduce or reduce-scatter partial,  + b     keeps x and A
        backward   gather dy under sequence parallelism,  dx = dy A,  dA = dy^T x,
                   db = sum of this rank's dy

The gathered input is not stored (2205.05198 sec. 4.2.2). A group of None issues no collective.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import (
    all_gather_first_dim,
    all_reduce,
    all_reduce_,
    reduce_scatter_first_dim,
    results_may_be_kept,
    start_all_gather_first_dim,
    start_all_reduce_,
    start_reduce_scatter_first_dim,
)
from megatron_lite.parallel.weight_gradient import (
    OwnSum,
    in_autocast_dtype,
    own_sum,
    weight_gradient,
)


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
    Collectives are in the module's table. Keeps hidden_states and the weight.
    """
    if torch.is_autocast_enabled(hidden_states.device.type):
        hidden_states, weight, bias = in_autocast_dtype(hidden_states, weight, bias)
    return _ColumnParallelMatmul.apply(
        hidden_states, weight, bias, tp_group, sequence_parallel, own_sum(weight)
    )


def row_parallel_linear(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    tp_group: ProcessGroup | None,
    sequence_parallel: bool,
    skip_tail: bool = False,
) -> Tensor:
    """Returns x A^T summed over the TP ranks, plus the bias once.

    hidden_states: [s, b, n/t]. weight: [m, n/t]. bias: [m]. The result is [s, b, m], under sequence
    parallelism [s/t, b, m]. Collectives are in the module's table. Keeps hidden_states and the
    weight.
    skip_tail: builds only the graph, without matmul and collective, for a replay whose output is
        never read. Backward does not read the output. The values of the result are undefined.
    """
    if torch.is_autocast_enabled(hidden_states.device.type):
        hidden_states, weight, bias = in_autocast_dtype(hidden_states, weight, bias)
    return _RowParallelMatmul.apply(
        hidden_states, weight, bias, tp_group, sequence_parallel, own_sum(weight), skip_tail
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
        if sequence_parallel:
            hidden_states = all_gather_first_dim(hidden_states, tp_group)
        return F.linear(hidden_states, weight, bias)

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


class _RowParallelMatmul(torch.autograd.Function):
    """x [s, b, n/t] -> y [s/t or s, b, m], with the collectives of the module's table."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tp_group: ProcessGroup | None,
        sequence_parallel: bool,
        add: OwnSum | None,
        skip_tail: bool,
    ) -> Tensor:
        ctx.tp_group, ctx.sequence_parallel, ctx.add = tp_group, sequence_parallel, add
        ctx.save_for_backward(hidden_states, weight)
        if skip_tail:
            # One element, expanded: the result has the right shape and takes no memory.
            s, *others = hidden_states.shape[:-1]
            rows = s // tp_group.size() if sequence_parallel and tp_group is not None else s
            return hidden_states.new_empty(()).expand(rows, *others, weight.shape[0])
        if tp_group is None:
            return F.linear(hidden_states, weight, bias)
        partial = F.linear(hidden_states, weight)
        if sequence_parallel:
            output = reduce_scatter_first_dim(partial, tp_group)
        elif results_may_be_kept():
            output = all_reduce(partial, tp_group)
        else:
            output = all_reduce_(partial, tp_group)
        if bias is None:
            return output
        # A result that a policy keeps must not be overwritten.
        return output + bias if results_may_be_kept() else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Under sequence parallelism the bias was added to this rank's tokens only. Its gradient
        # therefore uses dy before the gather.
        grad_bias = grad_output.flatten(0, -2).sum(0) if needs_bias else None
        if ctx.sequence_parallel:
            grad_output = all_gather_first_dim(grad_output, ctx.tp_group)
        grad_input = grad_output.matmul(weight) if needs_input else None
        grad_weight = weight_gradient(ctx.add, hidden_states, grad_output) if needs_weight else None
        return grad_input, grad_weight, grad_bias, None, None, None, None
