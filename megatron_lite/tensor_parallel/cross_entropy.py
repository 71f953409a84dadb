"""Cross-entropy over logits whose vocabulary is sharded over the TP ranks.

The logits are never gathered.

    forward    row_statistics    any rows, this rank's columns: the maximum, the sum of
                                 exponentials and the label's logit
               combined          all rows at once: two all-reduces, then the losses
    backward   write_gradient_   any rows, this rank's columns: softmax - one_hot

linear_cross_entropy.py combines the same steps for logits that exist one loss chunk at a time.

On CUDA the steps on rows are compiled graphs (`compiled_loss`) for all rows at once: one reads the
logits for their statistics, in forward and again in backward, and one writes the gradient over
them. Elsewhere torch's operators take a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.config.row_blocks import rows_at_a_time
from megatron_lite.parallel.collectives import all_reduce, all_reduce_
from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.parallel.torch_internals import backward_keeps_graph


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    tp_group: ProcessGroup | None,
    first_id: int,
    num_ids: int,
    overwrite_logits: bool = False,
    kernels: CompiledKernels | None = None,
) -> Tensor:
    """Returns the negative log-likelihood of each label, [s, b], the same on every TP rank.

    The losses are float32 (float64 for float64 logits). The computation has this dtype too. It
    covers a few rows at a time, or is one compiled graph, so no copy of all logits in this dtype
    exists.

    logits: [s, b, padded V / t], this rank's columns.
    labels: [s, b], global ids, each below the true V.
    first_id: the global id of column 0.
    num_ids: the number of this rank's columns that have true ids. The other columns are padding.
        They take no part in the softmax and have gradient 0, so the loss does not depend on the
        padding, nor on t.
    overwrite_logits: whether backward writes the gradient over the logits, so that it needs no
        second tensor of their size. The caller must not read the logits afterwards. A backward
        that keeps the graph (retain_graph, create_graph) does not overwrite them.
    kernels: the compiled graphs (`compiled_loss`). None: torch's operators.

    Forward issues two all-reduces: one of the maxima [s, b], and one of the label logits and the
    sums of exponentials [2, s b]. Backward issues none.
    Keeps the logits (in their own dtype), the labels, one byte per label, and for each row this
    rank's share of the softmax.
    """
    return _VocabParallelCrossEntropy.apply(
        logits, labels, tp_group, first_id, num_ids, overwrite_logits, kernels
    )


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        tp_group: ProcessGroup | None,
        first_id: int,
        num_ids: int,
        overwrite_logits: bool,
        kernels: CompiledKernels | None,
    ) -> Tensor:
        local = local_labels(labels, first_id, num_ids)
        statistics = row_statistics(logits.flatten(0, 1), local.column, num_ids, kernels)
        losses, share = combined(statistics, local, tp_group)
        ctx.save_for_backward(logits, *local, share)
        ctx.num_ids, ctx.overwrite_logits, ctx.kernels = num_ids, overwrite_logits, kernels
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        logits, column, here, share = ctx.saved_tensors
        # A graph that is kept may be used by another backward, which needs the logits.
        keeps_graph = backward_keeps_graph()
        if ctx.overwrite_logits and logits.is_contiguous() and not keeps_graph:
            grad = logits
        else:
            grad = logits.clone(memory_format=torch.contiguous_format)
        factors = gradient_factors(grad_output, share, LocalLabels(column, here))
        write_gradient_(grad.flatten(0, 1), factors, num_ids=ctx.num_ids, kernels=ctx.kernels)
        return grad, *[None] * 6


class LocalLabels(NamedTuple):
    """The place of each row's label among this rank's columns.

    column: [n], the label's column, or an arbitrary one if the label is on another rank.
    here: [n], whether the label's column is on this rank.
    """

    column: Tensor
    here: Tensor


class RowStatistics(NamedTuple):
    """Statistics of each row over this rank's columns.

    maximum: [n], the largest logit; -inf if the rank has no columns.
    total: [n], the sum of exp(logit - maximum); 0 if the rank has no columns.
    at_label: [n], the logit in the label's column; 0 if the rank has no columns.
    """

    maximum: Tensor
    total: Tensor
    at_label: Tensor


class Combined(NamedTuple):
    """The losses of all rows, and the share of the softmax on this rank.

    losses: [n].
    share: [n], the sum of the softmax over this rank's columns (1 for a group of one).
    """

    losses: Tensor
    share: Tensor


class GradientFactors(NamedTuple):
    """The factors of each row's gradient, [n, 1] each.

    The gradient of a row is `softmax` times the softmax over this rank's columns, plus `at_label`
    in the label's `column`.
    """

    softmax: Tensor
    at_label: Tensor
    column: Tensor

    def of_rows(self, rows: slice) -> GradientFactors:
        """Returns the factors of some rows."""
        return GradientFactors(*(factor[rows] for factor in self))


def local_labels(labels: Tensor, first_id: int, num_ids: int) -> LocalLabels:
    """Returns this rank's columns for n global ids of any shape, [n] each.

    The rank's columns have the ids first_id to first_id + num_ids - 1.
    """
    local = labels.flatten() - first_id
    return LocalLabels(local.clamp(0, max(num_ids - 1, 0)), (local >= 0) & (local < num_ids))


def compiled_loss(device: torch.device) -> CompiledKernels | None:
    """Returns the compiled graphs of the loss, on CUDA if inductor can build them here, else None.

    It builds those of two rows, which takes some seconds.
    """
    if device.type != "cuda":
        return None
    kernels = CompiledKernels(device)
    rows = torch.zeros(2, 8, dtype=torch.bfloat16, device=device)
    labels = local_labels(torch.zeros(2, dtype=torch.int64, device=device), 0, 8)
    try:
        with torch.no_grad():
            statistics = row_statistics(rows, labels.column, 8, kernels)
            factors = gradient_factors(statistics.total, statistics.total, labels)
            write_gradient_(rows, factors, num_ids=8, kernels=kernels)
    except Exception:  # whatever the compiler or the machine lacks: torch's operators need nothing
        return None
    return kernels


def row_statistics(
    logits: Tensor, column: Tensor, num_ids: int, kernels: CompiledKernels | None = None
) -> RowStatistics:
    """Returns the statistics of the first num_ids columns of the logits [n, columns].

    column: [n], the label's column of each row. Each statistic is [n], at least float32. Issues no
    collective.
    """
    if num_ids and kernels is not None and not torch.is_grad_enabled():
        return RowStatistics(*kernels(statistics_of_rows, logits, column, num_ids=num_ids))
    rows = logits[:, :num_ids]
    dtype = torch.promote_types(torch.float32, rows.dtype)
    maximum = torch.full(rows.shape[:1], -torch.inf, dtype=dtype, device=rows.device)
    total, at_label = torch.zeros_like(maximum), torch.zeros_like(maximum)
    if rows.shape[1]:
        # The largest softmax of a row is 1 / total, and torch's softmax is faster than its exp.
        for part in cached_rows(rows):
            maximum[part] = rows[part].amax(-1).to(dtype)
            total[part] = torch.softmax(rows[part], -1, dtype=dtype).amax(-1).reciprocal_()
        at_label = rows.gather(-1, column.unsqueeze(-1)).squeeze(-1).to(dtype)
    return RowStatistics(maximum, total, at_label)


def statistics_of_rows(
    logits: Tensor, column: Tensor, *, num_ids: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the fields of RowStatistics, by operators that inductor fuses into one pass."""
    wide = _true_columns(logits, num_ids, torch.promote_types(torch.float32, logits.dtype))
    maximum = wide.amax(-1, keepdim=True)
    total = (wide - maximum).exp().sum(-1)
    at_label = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).to(wide.dtype)
    return maximum.squeeze(-1), total, at_label


def _true_columns(logits: Tensor, num_ids: int, dtype: torch.dtype) -> Tensor:
    """Returns the logits in this dtype, and -inf in the columns of the padding."""
    wide = logits.to(dtype)
    if num_ids == logits.shape[1]:
        return wide
    return torch.where(_columns(logits) < num_ids, wide, -torch.inf)


def _columns(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], device=logits.device)


def combined(
    statistics: RowStatistics, labels: LocalLabels, tp_group: ProcessGroup | None
) -> Combined:
    """Returns the losses, combined from the statistics of all ranks.

    Issues two all-reduces: of [n] (the maxima) and of [2, n] (the sums).
    """
    maximum = all_reduce(statistics.maximum, tp_group, dist.ReduceOp.MAX)
    # Each rank took its exponentials relative to its own maximum. A rank with padding alone has
    # the maximum -inf, and exp(-inf) = 0 is its part of the sum.
    share = statistics.total * (statistics.maximum - maximum).exp_()
    sums = torch.stack((torch.where(labels.here, statistics.at_label - maximum, 0.0), share))
    all_reduce_(sums, tp_group)
    # loss = log(sum of exp(x - maximum)) - (x_label - maximum)
    return Combined(sums[1].log() - sums[0], share.div_(sums[1]))


def gradient_factors(grad_losses: Tensor, share: Tensor, labels: LocalLabels) -> GradientFactors:
    """Returns the factors of all rows, [n, 1] each.

    grad_losses: the incoming gradient of each row's loss, n in any shape. share: [n].
    """
    # The gradient of a row is dloss (softmax - one_hot). The softmax over the columns of all ranks
    # is `share` times the softmax over this rank's columns.
    grad = grad_losses.flatten().to(share.dtype)
    return GradientFactors(
        *(factor.unsqueeze(-1) for factor in (grad * share, -grad * labels.here, labels.column))
    )


def write_gradient_(
    logits: Tensor,
    factors: GradientFactors,
    *,
    num_ids: int,
    kernels: CompiledKernels | None = None,
) -> None:
    """Overwrites the logits [n, columns] with their gradient.

    The columns from num_ids on are padding and get 0.
    """
    if num_ids and kernels is not None and not torch.is_grad_enabled():
        softmax, at_label, column = factors
        maximum, total, _ = kernels(statistics_of_rows, logits, column.squeeze(-1), num_ids=num_ids)
        scale = softmax / total.unsqueeze(-1)
        kernels(
            overwrite_rows_, logits, maximum.unsqueeze(-1), scale, at_label, column, num_ids=num_ids
        )
        return
    logits[:, num_ids:] = 0.0
    rows = logits[:, :num_ids]
    for part in cached_rows(rows) if num_ids else ():
        softmax, at_label, column = factors.of_rows(part)
        gradient = torch.softmax(rows[part], -1, dtype=softmax.dtype).mul_(softmax)
        rows[part] = gradient.scatter_add_(-1, column, at_label)
        del gradient  # it would live on while the next one is made


def overwrite_rows_(
    logits: Tensor,
    maximum: Tensor,
    scale: Tensor,
    at_label: Tensor,
    column: Tensor,
    *,
    num_ids: int,
) -> None:
    """Overwrites the logits with scale exp(logit - maximum), plus `at_label` in the label's column.

    It is pointwise: inductor makes one kernel of it, which needs no further tensor.
    """
    wide = _true_columns(logits, num_ids, scale.dtype)
    here = torch.where(_columns(logits) == column, at_label, 0.0)
    logits.copy_((wide - maximum).exp() * scale + here)


def cached_rows(rows: Tensor) -> Sequence[slice]:
    """Returns the row ranges that are computed in float32 one after the other."""
    step = rows_at_a_time(rows.shape[0], rows.shape[1], rows.device.type)
    return [slice(start, start + step) for start in range(0, rows.shape[0], step)]
