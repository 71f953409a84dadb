"""The conjugate mappings between replicated, sharded and partial tensors.

Papers: arXiv 1909.08053 sec. 3 and 2205.05198 sec. 4.2.2. The last column is what each rank
receives in forward.

    name                                        forward        backward         received
    reduce_from_tensor_parallel_region          all-reduce     identity         2 (t-1)/t of the
      (g of 1909.08053)                                                         tensor
    gather_from_sequence_parallel_region        all-gather,    reduce-scatter   (t-1)/t of the
      (g of 2205.05198)                         dim 0                           gathered tensor
    reduce_scatter_to_sequence_parallel_region  reduce-        all-gather       (t-1)/t of the
                                                scatter                         full tensor
    gather_from_tensor_parallel_region          all-gather,    this rank's      (t-1)/t of the
                                                last dim       slice            gathered tensor

Each wrapper returns its input if the group is None. No Function keeps a tensor for backward. The
dual of the first mapping is f of 1909.08053: identity forward, all-reduce backward. It has no
function here, because column_linear.py overlaps that all-reduce with a matmul.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import (
    all_gather_first_dim,
    all_reduce,
    reduce_scatter_first_dim,
)


def reduce_from_tensor_parallel_region(partial: Tensor, tp_group: ProcessGroup | None) -> Tensor:
    """Returns the sum of the ranks' partial tensors, the same on every rank (g of 1909.08053).

    The partial tensors have any one shape, such as [s, b, h].
    """
    return partial if tp_group is None else _Reduce.apply(partial, tp_group)


def gather_from_sequence_parallel_region(
    hidden_states: Tensor, tp_group: ProcessGroup | None
) -> Tensor:
    """Gathers [s/t, ...] of each rank into [s, ...], for the input of a column-parallel layer.

    Each rank's gradient of that input is partial, so backward sums them (reduce-scatter).
    """
    return hidden_states if tp_group is None else _GatherSequence.apply(hidden_states, tp_group)


def reduce_scatter_to_sequence_parallel_region(
    partial: Tensor, tp_group: ProcessGroup | None
) -> Tensor:
    """Sums [s, ...] partial tensors over the ranks and returns this rank's [s/t, ...] of the sum.

    Raises ValueError if t does not divide s.
    """
    return partial if tp_group is None else _ReduceScatterSequence.apply(partial, tp_group)


def gather_from_tensor_parallel_region(sharded: Tensor, tp_group: ProcessGroup | None) -> Tensor:
    """Gathers [..., n/t] of each rank into [..., n], with all columns on every rank.

    Every rank must compute the same from the result, because backward takes a slice and sums
    nothing.
    """
    return sharded if tp_group is None else _GatherColumns.apply(sharded, tp_group)


class _Reduce(torch.autograd.Function):
    """All-reduce forward, identity backward. The dual (f) is part of a column-parallel layer."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, tp_group: ProcessGroup) -> Tensor:
        return all_reduce(partial, tp_group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        # Every rank has the whole gradient of the sum, and each partial tensor is one summand.
        return grad_output, None


class _GatherSequence(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward: the dual of _ReduceScatterSequence."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, tp_group: ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return all_gather_first_dim(hidden_states, tp_group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_first_dim(grad_output, ctx.tp_group), None


class _ReduceScatterSequence(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward: the dual of _GatherSequence."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, tp_group: ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return reduce_scatter_first_dim(partial, tp_group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return all_gather_first_dim(grad_output, ctx.tp_group), None


class _GatherColumns(torch.autograd.Function):
    """All-gather of the columns forward, this rank's slice backward.

    The operations after the gather are the same on every rank. Each rank's gradient is therefore
    complete, and backward needs no collective.
    """

    @staticmethod
    def forward(ctx: Any, sharded: Tensor, tp_group: ProcessGroup) -> Tensor:
        ctx.rank, ctx.columns = tp_group.rank(), sharded.shape[-1]
        stacked = all_gather_first_dim(sharded.unsqueeze(0), tp_group)  # [t, ..., n/t]
        return stacked.movedim(0, -2).flatten(-2)  # [..., t, n/t], then [..., n]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output.narrow(-1, ctx.rank * ctx.columns, ctx.columns).contiguous(), None
