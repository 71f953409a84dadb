"""Norms and zeros of the whole model's gradients or weights, over the ranks that hold the model.

None of the functions waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.optim.layouts import Piece
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import foreach_norm


def global_norms(
    pieces: Sequence[Piece],
    values: Sequence[Tensor],
    parallel: ParallelState,
    shard_group: ProcessGroup | None,
    *,
    loss: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the true 2-norm of the pieces' `values` (gradients, or the masters themselves), 0-d,
    and the norms of this rank's pieces, one each.

    The norm is NaN or infinite if any value of any rank is, or the loss (0-d) of any rank.
    Replicated parameters add to the norm on TP rank 0 only, but every rank checks its copy for NaN.
    shard_group: the ranks that hold different pieces. The function issues one all-reduce of one
    number over this group, over the TP group and over the pipeline each.
    """
    norms = foreach_norm(list(values)) if values else ()
    counted: list[Tensor] = []
    others: list[Tensor] = []
    for piece, norm in zip(pieces, norms, strict=True):
        (counted if _counts_here(piece.spec, parallel) else others).append(norm)
    empty = torch.zeros(1, device=parallel.device)
    total = (torch.stack(counted) if counted else empty).square().sum()
    if others:
        total = total + (torch.stack(others) * 0.0).sum()  # adds 0, or NaN if one is not finite
    if loss is not None:  # as above: 0, or NaN if the loss is not finite
        total = total + loss.to(total.dtype) * 0.0
    whole = _sum_over_model(total, parallel, shard_group).sqrt()
    return whole, torch.stack(norms) if norms else empty


def count_zeros(
    pieces: Sequence[Piece],
    values: Sequence[Tensor],
    parallel: ParallelState,
    shard_group: ProcessGroup | None,
) -> Tensor:
    """Returns how many elements of the values are 0, over the whole model without padding.

    The number is 0-d int64. The function issues the same all-reduces as `global_norms`.
    """
    zeros = torch.zeros((), dtype=torch.int64, device=parallel.device)
    for piece, value in zip(pieces, values, strict=True):
        if _counts_here(piece.spec, parallel):
            true = value.reshape(-1)[: _true_elements(piece, parallel)]
            zeros += true.numel() - true.count_nonzero()
    return _sum_over_model(zeros, parallel, shard_group)


def _sum_over_model(
    value: Tensor, parallel: ParallelState, shard_group: ProcessGroup | None
) -> Tensor:
    # Each sum covers the ranks of one axis, so the three together cover every shard once.
    for group in (shard_group, parallel.tp_group, parallel.pp_group):
        value = all_reduce_(value, group)
    return value


def _true_elements(piece: Piece, parallel: ParallelState) -> int:
    """Returns how many elements come before the vocabulary padding, whose gradient is 0."""
    spec, stop = piece.spec, piece.stop
    if spec.tp_dim is not None and spec.padded_length is not None:
        assert spec.tp_dim == 0 and spec.tp_blocks == 1, "a vocabulary is padded along dim 0"
        rows = sum(span.length for span in spec.spans(parallel.tp_rank, parallel.tp_size))
        stop = min(stop, rows * math.prod(spec.global_shape[1:]))
    return max(0, stop - piece.start)


def _counts_here(spec: ParameterSpec, parallel: ParallelState) -> bool:
    """Returns whether a parameter adds to the figures on this rank.

    A sharded parameter counts on every TP rank. A replicated one counts on TP rank 0 only. The last
    stage's copy of a tied weight never counts.
    """
    return not spec.is_copy and (parallel.tp_rank == 0 or spec.tp_dim is not None)
