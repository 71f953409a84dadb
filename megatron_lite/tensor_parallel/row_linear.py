"""One autograd Function for a row-parallel matmul, the sum over the ranks and the bias.

    forward   partial = x A^T,  all-reduce or reduce-scatter partial,  + b        keeps x and A
    backward  gather dy under sequence parallelism,  dx = dy A,  dA = dy^T x,
              db = sum of this rank's dy

Backward never reads the output. A replay whose output is never used can therefore skip the matmul
and the collective.
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
)
from megatron_lite.parallel.weight_gradient import own_sum, weight_gradient
from megatron_lite.tensor_parallel.column_linear import autocast_operands


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
    parallelism [s/t, b, m]. Collectives are in the module's table; a group of None issues none.
    Keeps hidden_states and the weight.
    skip_tail: builds only the graph; the values of the result are undefined.
    """
    return _RowParallelMatmul.apply(
        *autocast_operands(hidden_states, weight, bias), tp_group, sequence_parallel, skip_tail
    )


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
        skip_tail: bool,
    ) -> Tensor:
        ctx.tp_group = tp_group
        ctx.sequence_parallel = sequence_parallel and tp_group is not None
        ctx.add = own_sum(weight)
        ctx.save_for_backward(hidden_states, weight)
        if skip_tail:
            # One element, expanded: the result has the right shape and takes no memory.
            s, *others = hidden_states.shape[:-1]
            rows = s // tp_group.size() if ctx.sequence_parallel and tp_group is not None else s
            return hidden_states.new_empty(()).expand(rows, *others, weight.shape[0])
        if tp_group is None:
            return F.linear(hidden_states, weight, bias)
        partial = F.linear(hidden_states, weight)
        if results_may_be_kept():  # a kept result must not be overwritten by the next step
            output = (reduce_scatter_first_dim if sequence_parallel else all_reduce)(
                partial, tp_group
            )
            return output if bias is None else output + bias
        output = (
            reduce_scatter_first_dim(partial, tp_group)
            if sequence_parallel
            else all_reduce_(partial, tp_group)
        )
        return output if bias is None else output.add_(bias)

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
        return grad_input, grad_weight, grad_bias, None, None, None
