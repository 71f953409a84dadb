"""The conjugate mappings between replicated, sharded and partial tensors (arXiv 1909.08053 sec. 3, 2205.05198 sec. 4.2.2).

    name                                            forward            backward           bytes received per rank, forward
    copy_to_tensor_parallel_region (f, 1909.08053)  identity           all-reduce         0
    reduce_from_tensor_parallel_region (g, same)    all-reduce         identity           2 (t-1)/t of the tensor
    gather_from_sequence_parallel_region (g, 2205.) all-gather dim 0   reduce-scatter     (t-1)/t of the gathered tensor
    reduce_scatter_to_sequence_parallel_region      reduce-scatter     all-gather         (t-1)/t of the full tensor
    gather_from_tensor_parallel_region              all-gather last    this rank's slice  (t-1)/t of the gathered tensor

Each wrapper returns its input where the group is None; no Function keeps a tensor for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import all_gather_first_dim, all_reduce, reduce_scatter_first_dim


def copy_to_tensor_parallel_region(hidden_states: Tensor, tp_group: ProcessGroup | None) -> Tensor:
    """f: the same tensor on every TP rank, whose gradient is the sum of the ranks' gradients."""
    return hidden_states if tp_group is None else _Copy.apply(hidden_states, tp_group)


def reduce_from_tensor_parallel_region(partial: Tensor, tp_group: ProcessGroup | None) -> Tensor:
    """g: the sum of the ranks' partial tensors, the same on every rank."""
    return partial if tp_group is None else _Reduce.apply(partial, tp_group)


def gather_from_sequence_parallel_region(hidden_states: Tensor, tp_group: ProcessGroup | None) -> Tensor:
    """[s/t, ...] -> [s, ...]. For inputs of column-parallel layers: each rank's gradient is partial, so they are summed."""
    return hidden_states if tp_group is None else _GatherSequence.apply(hidden_states, tp_group)


def reduce_scatter_to_sequence_parallel_region(partial: Tensor, tp_group: ProcessGroup | None) -> Tensor:
    """[s, ...] partial sums -> this rank's [s/t, ...] of the sum. ValueError where t does not divide s."""
    return partial if tp_group is None else _ReduceScatterSequence.apply(partial, tp_group)


def gather_from_tensor_parallel_region(sharded: Tensor, tp_group: ProcessGroup | None) -> Tensor:
    """[..., n/t] -> [..., n]: all columns on every rank. Every rank must then compute the same from it."""
    return sharded if tp_group is None else _GatherColumns.apply(sharded, tp_group)


class _Copy(torch.autograd.Function):
    """Dual of _Reduce."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, tp_group: ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad_output, ctx.tp_group), None  # out of place: autograd may share grad_output


class _Reduce(torch.autograd.Function):
    """Dual of _Copy."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, tp_group: ProcessGroup) -> Tensor:
        return all_reduce(partial, tp_group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


class _GatherSequence(torch.autograd.Function):
    """Dual of _ReduceScatterSequence."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, tp_group: ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return all_gather_first_dim(hidden_states, tp_group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_first_dim(grad_output, ctx.tp_group), None


class _ReduceScatterSequence(torch.autograd.Function):
    """Dual of _GatherSequence."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, tp_group: ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return reduce_scatter_first_dim(partial, tp_group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return all_gather_first_dim(grad_output, ctx.tp_group), None


class _GatherColumns(torch.autograd.Function):
    """What follows runs alike on every rank, so each rank's gradient is already whole: the dual is a slice."""

    @staticmethod
    def forward(ctx: Any, sharded: Tensor, tp_group: ProcessGroup) -> Tensor:
        ctx.rank, ctx.columns = tp_group.rank(), sharded.shape[-1]
        stacked = all_gather_first_dim(sharded.unsqueeze(0), tp_group)  # [t, ..., n/t]
        return stacked.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output.narrow(-1, ctx.rank * ctx.columns, ctx.columns).contiguous(), None
