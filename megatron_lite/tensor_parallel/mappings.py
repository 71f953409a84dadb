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
    copy_to_tensor_parallel_region              identity       all-reduce       -
      (f of 1909.08053)

Each function returns its input if the group is None, and keeps no tensor for backward. The linear
layers (layers.py) have f and g themselves, since they overlap them with matmuls.
"""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import (
    Group,
    all_gather_first_dim,
    all_reduce,
    reduce_scatter_first_dim,
)
from megatron_lite.parallel.compiled import Pair, applied

Collective = Callable[[Tensor, ProcessGroup], Tensor]


def reduce_from_tensor_parallel_region(
    partial: Tensor, tp_group: Group, skip_tail: bool = False
) -> Tensor:
    """Returns the sum of the ranks' partial tensors, the same on every rank (g of 1909.08053).

    Each partial tensor is one summand, so its gradient is the whole gradient of the sum.
    skip_tail: builds only the graph, for a replay whose output is never read.
    """
    unread = partial.shape if skip_tail else None
    return mapped(partial, tp_group, all_reduce, lambda grad, _: grad, unread)


def copy_to_tensor_parallel_region(whole: Tensor, tp_group: Group) -> Tensor:
    """Returns the tensor. Each rank's gradient of it is partial, so backward sums them."""
    return mapped(whole, tp_group, lambda tensor, _: tensor.view_as(tensor), all_reduce)


def gather_from_sequence_parallel_region(hidden_states: Tensor, tp_group: Group) -> Tensor:
    """Gathers [s/t, ...] of each rank into [s, ...], for the input of a column-parallel layer.

    Each rank's gradient of that input is partial, so backward sums them (reduce-scatter).
    """
    return mapped(hidden_states, tp_group, all_gather_first_dim, reduce_scatter_first_dim)


def reduce_scatter_to_sequence_parallel_region(
    partial: Tensor, tp_group: Group, skip_tail: bool = False
) -> Tensor:
    """Sums [s, ...] partial tensors over the ranks and returns this rank's [s/t, ...] of the sum.

    Raises ValueError if t does not divide s. skip_tail: see reduce_from_tensor_parallel_region.
    """
    unread = None
    if skip_tail and tp_group is not None:
        unread = partial.shape[0] // tp_group.size(), *partial.shape[1:]
    return mapped(partial, tp_group, reduce_scatter_first_dim, all_gather_first_dim, unread)


def gather_from_tensor_parallel_region(sharded: Tensor, tp_group: Group) -> Tensor:
    """Gathers [..., n/t] of each rank into [..., n], with all columns on every rank.

    Every rank must compute the same from the result. Each rank's gradient is then complete, so
    backward takes a slice and sums nothing.
    """
    return mapped(sharded, tp_group, _gather_columns, _own_columns)


def _gather_columns(sharded: Tensor, tp_group: ProcessGroup) -> Tensor:
    stacked = all_gather_first_dim(sharded.unsqueeze(0), tp_group)  # [t, ..., n/t]
    return stacked.movedim(0, -2).flatten(-2)  # [..., t, n/t], then [..., n]


def _own_columns(whole: Tensor, tp_group: ProcessGroup) -> Tensor:
    return whole.chunk(tp_group.size(), -1)[tp_group.rank()].contiguous()


def mapped(
    tensor: Tensor,
    group: Group,
    forward: Collective,
    backward: Collective,
    unread: Sequence[int] | None = None,
) -> Tensor:
    """Returns `forward` of the tensor. Its gradient is `backward` of the result's.

    unread: see `applied`.
    """
    if group is None:
        return tensor
    pair = Pair(lambda one: forward(one, group), lambda grad: backward(grad, group), slice(0))
    return applied(pair, tensor, unread=unread)
