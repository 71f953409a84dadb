"""Cross-entropy over logits whose vocabulary is split over the TP ranks; the logits are never gathered.

    forward    row_statistics       of any rows of logits: maximum, sum of exponentials, label logit     this rank's columns
               combined             all rows at once: two all-reduces, then the losses
    backward   write_gradient_      of any rows of logits: softmax - one_hot                             this rank's columns

linear_cross_entropy.py puts the same steps together for logits that exist a chunk at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import all_reduce, all_reduce_


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, *, tp_group: ProcessGroup | None, first_id: int,
                                 num_ids: int) -> Tensor:
    """The negative log-likelihood of each label, float32 (float64 for float64 logits) [s, b], the same on every TP rank.

    logits: [s, b, padded V / t], this rank's columns. labels: [s, b], global ids, each below the true V.
    first_id: global id of column 0. num_ids: how many columns stand for true ids; the rest is padding, takes no part in the
    softmax and has gradient 0, so that the loss does not depend on the padding and so not on t.
    Computed in that dtype, a few rows at a time: no such copy of all logits exists.
    Forward: all-reduces of three [s, b] tensors (maximum, then label logit and sum of exponentials in one). Keeps the logits
    (in their own dtype), the labels, one byte per label, and per row this rank's share of the softmax.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, tp_group, first_id, num_ids)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp_group: ProcessGroup | None, first_id: int,
                num_ids: int) -> Tensor:
        local = local_labels(labels, first_id, num_ids)
        statistics = row_statistics(logits.flatten(0, 1)[:, :num_ids], local.column)
        losses, share = combined(statistics, local, tp_group)
        ctx.save_for_backward(logits, *local, share)
        ctx.num_ids = num_ids
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        logits, column, here, share = ctx.saved_tensors
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        factors = gradient_factors(grad_output, share, LocalLabels(column, here))
        write_gradient_(grad.flatten(0, 1), logits.flatten(0, 1), factors, num_ids=ctx.num_ids)
        return grad, None, None, None, None


class LocalLabels(NamedTuple):
    """Of each row, [n]: the label's column on this rank, and whether it is here at all (if not, the column is any)."""

    column: Tensor
    here: Tensor


class RowStatistics(NamedTuple):
    """Of this rank's columns, [n]: the maximum, the sum of exp(logit - maximum), the logit in the label's column.

    -inf, 0 and 0 for rows without columns.
    """

    maximum: Tensor
    total: Tensor
    at_label: Tensor


class Combined(NamedTuple):
    """[n]: the losses, and this rank's part of the softmax's mass (1 for a group of one)."""

    losses: Tensor
    share: Tensor


class GradientFactors(NamedTuple):
    """[n, 1] each: a row's gradient is softmax of this rank's columns x `softmax`, plus `at_label` in the label's `column`."""

    softmax: Tensor
    at_label: Tensor
    column: Tensor

    def of_rows(self, rows: slice) -> GradientFactors:
        """Those of some rows."""
        return GradientFactors(*(factor[rows] for factor in self))


def local_labels(labels: Tensor, first_id: int, num_ids: int) -> LocalLabels:
    """Global ids of any shape -> columns of this rank, flat."""
    local = labels.flatten() - first_id
    return LocalLabels(local.clamp(0, max(num_ids - 1, 0)), (local >= 0) & (local < num_ids))


def row_statistics(rows: Tensor, column: Tensor) -> RowStatistics:
    """[n, ids], [n] -> three of [n], at least float32. Sends nothing.

    The largest softmax of a row is 1 / total, and torch's softmax is faster than its exp.
    """
    dtype = torch.promote_types(torch.float32, rows.dtype)
    maximum = torch.full(rows.shape[:1], -torch.inf, dtype=dtype, device=rows.device)
    total, at_label = torch.zeros_like(maximum), torch.zeros_like(maximum)
    if rows.shape[1]:
        for part in cached_rows(rows):
            maximum[part] = rows[part].amax(-1).to(dtype)
            total[part] = torch.softmax(rows[part], -1, dtype=dtype).amax(-1).reciprocal_()
        at_label = rows.gather(-1, column.unsqueeze(-1)).squeeze(-1).to(dtype)
    return RowStatistics(maximum, total, at_label)


def combined(statistics: RowStatistics, labels: LocalLabels, tp_group: ProcessGroup | None) -> Combined:
    """The losses, from what every rank knows of its columns. All-reduces of [n] (maximum) and [2, n] (sums)."""
    maximum = all_reduce(statistics.maximum, tp_group, dist.ReduceOp.MAX)
    share = statistics.total * (statistics.maximum - maximum).exp_()
    sums = torch.stack((torch.where(labels.here, statistics.at_label - maximum, 0.0), share))
    all_reduce_(sums, tp_group)
    return Combined(sums[1].log() - sums[0], share.div_(sums[1]))


def gradient_factors(grad_losses: Tensor, share: Tensor, labels: LocalLabels) -> GradientFactors:
    """Of all rows, from the incoming gradient of each."""
    grad = grad_losses.flatten().to(share.dtype)
    return GradientFactors(*(factor.unsqueeze(-1) for factor in (grad * share, -grad * labels.here, labels.column)))


def write_gradient_(grad: Tensor, logits: Tensor, factors: GradientFactors, *, num_ids: int) -> None:
    """Fills grad [n, columns], which may be the logits themselves. Columns from num_ids on get 0."""
    grad[:, num_ids:] = 0.0
    rows = logits[:, :num_ids]
    for part in cached_rows(rows) if num_ids else ():
        softmax, at_label, column = factors.of_rows(part)
        gradient = torch.softmax(rows[part], -1, dtype=softmax.dtype).mul_(softmax)
        grad[part, :num_ids] = gradient.scatter_add_(-1, column, at_label)


def cached_rows(rows: Tensor) -> list[slice]:
    """Row ranges whose float32 form stays in a CPU core's cache, or takes at most 256 MiB of a GPU."""
    limit = 2**20 if rows.device.type == "cpu" else 2**28
    step = max(1, limit // (4 * rows.shape[-1]))
    return [slice(start, start + step) for start in range(0, rows.shape[0], step)]
