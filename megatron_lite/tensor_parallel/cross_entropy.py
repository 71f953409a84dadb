"""Cross-entropy over logits whose vocabulary is sharded over the TP ranks.

The logits are never gathered. The steps are those of any rows of logits:

    row_statistics    this rank's columns: the maximum, the sum of exponentials, the label's logit
    combined          two all-reduces of these, then the losses
    write_gradient_   this rank's columns: softmax - one_hot

`vocab_parallel_cross_entropy` takes the logits of all tokens and keeps them for backward.
linear_cross_entropy.py computes the logits of one loss chunk at a time.

Under --torch-compile the steps on rows are compiled graphs for all rows at once: one reads the
logits for their statistics, and one writes the gradient over them. It needs of all ranks' columns
the log of the sum of exponentials, which takes the place of the share. Otherwise torch's operators
take a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.row_blocks import rows_at_a_time
from megatron_lite.parallel.collectives import Group, all_reduce, all_reduce_
from megatron_lite.parallel.compiled import Kernels, Pair, Tensors, applied, at_least_float32
from megatron_lite.parallel.torch_internals import backward_keeps_graph


class Columns(NamedTuple):
    """This rank's columns of the vocabulary.

    tp_group: the ranks that share the vocabulary, or None.
    first_id: the global id of column 0.
    num_ids: the number of columns that have true ids. The columns after them are padding. They take
        no part in the softmax and have gradient 0, so the loss does not depend on the padding, nor
        on t.
    kernels: the compiled graphs. None: torch's operators.
    cap: c of the logits c tanh(x / c) that have the loss. None: the logits are x itself.
    """

    tp_group: Group
    first_id: int
    num_ids: int
    kernels: Kernels = None
    cap: float | None = None

    def capped_(self, logits: Tensor) -> Tensor:
        """Overwrites the logits with capped ones, which are kept and read in their place."""
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, columns: Columns) -> Tensor:
    """Returns the negative log-likelihood of each label, [s, b], the same on every TP rank.

    The losses are float32 (float64 for float64 logits). The computation has this dtype too. It
    covers a few rows at a time, or is one compiled graph, so no copy of all logits in this dtype
    exists.

    logits: [s, b, padded V / t], this rank's columns, which the caller must not read afterwards.
        Forward writes capped ones over them, and backward their gradient, so that neither needs a
        second tensor of their size. A backward that keeps the graph (retain_graph, create_graph)
        does not overwrite them.
    labels: [s, b], global ids, each below the true V.

    Forward issues two all-reduces: one of the maxima [s, b], and one of the label logits and the
    sums of exponentials [2, s b]. Backward issues none.
    Keeps the logits (in their own dtype), the labels, one byte per label, and for each row this
    rank's share of the softmax, or with compiled graphs the log of the sum of exponentials.
    """

    def forward(logits: Tensor, labels: Tensor) -> Tensors:
        local = local_labels(labels, columns)
        if columns.cap is not None:
            logits = columns.capped_(logits)
        statistics = row_statistics(logits.flatten(0, 1), local, columns)
        losses, share = combined(statistics, local, columns)
        return losses.view(labels.shape), logits, *local, share

    def backward(
        grad_output: Tensor, logits: Tensor, column: Tensor, here: Tensor, share: Tensor
    ) -> Tensor:
        # A graph that is kept may be used by another backward, which needs the logits.
        if backward_keeps_graph() or not logits.is_contiguous():
            logits = logits.clone(memory_format=torch.contiguous_format)
        own = LocalLabels(column, here)
        write_gradient_(logits.flatten(0, 1), grad_output.flatten(), share, own, columns)
        return logits

    return applied(Pair(forward, backward, slice(0)), logits, labels)


class LocalLabels(NamedTuple):
    """The place of each row's label among this rank's columns.

    column: [n], the label's column, or an arbitrary one if the label is on another rank.
    here: [n], whether the label's column is on this rank.
    """

    column: Tensor
    here: Tensor

    def of(self, rows: slice) -> LocalLabels:
        """Returns those of some rows."""
        return LocalLabels(self.column[rows], self.here[rows])


class RowStatistics(NamedTuple):
    """Statistics of each row over this rank's columns, [n] each, at least float32.

    maximum: the largest logit; -inf if the rank has no columns.
    total: the sum of exp(logit - maximum); 0 if the rank has no columns.
    at_label: the logit in the label's column; 0 if the rank has no columns.
    """

    maximum: Tensor
    total: Tensor
    at_label: Tensor


def local_labels(labels: Tensor, columns: Columns) -> LocalLabels:
    """Returns the places of n global ids of any shape, [n] each."""
    settings = dict(first_id=columns.first_id, num_ids=columns.num_ids)
    return LocalLabels(*_run(columns, places_of, labels, **settings))


def places_of(labels: Tensor, *, first_id: int, num_ids: int) -> Tensors:
    """Returns the fields of LocalLabels."""
    local = labels.flatten() - first_id
    return local.clamp(0, max(num_ids - 1, 0)), (local >= 0) & (local < num_ids)


def row_statistics(logits: Tensor, labels: LocalLabels, columns: Columns) -> RowStatistics:
    """Returns the statistics of the logits [n, V/t], and writes -inf over padding. Issues no
    collective."""
    num_ids = columns.num_ids
    if num_ids and columns.kernels is not None:
        of_rows = _run(columns, statistics_of_rows, logits, labels.column, num_ids=num_ids)
        return RowStatistics(*of_rows)
    # Torch's softmax would copy rows without their padding, which are not contiguous.
    logits[:, num_ids:] = -torch.inf
    dtype, (count, width) = at_least_float32(logits.dtype), logits.shape
    maximum = torch.full((count,), -torch.inf, dtype=dtype, device=logits.device)
    total, at_label = torch.zeros_like(maximum), torch.zeros_like(maximum)
    if num_ids:
        # The largest softmax of a row is 1 / total, and torch's softmax is faster than its exp.
        step = rows_at_a_time(count, width, logits.device.type)
        for start in range(0, count, step):
            part = slice(start, start + step)
            maximum[part] = logits[part].amax(-1).to(dtype)
            total[part] = torch.softmax(logits[part], -1, dtype=dtype).amax(-1).reciprocal_()
        at_label = logits.gather(-1, labels.column.unsqueeze(-1)).squeeze(-1).to(dtype)
    return RowStatistics(maximum, total, at_label)


def combined(statistics: RowStatistics, labels: LocalLabels, columns: Columns) -> Tensors:
    """Returns the losses [n], and what `write_gradient_` needs of all ranks, [n].

    That is the share of the softmax that is in this rank's columns, or with compiled graphs the log
    of the sum of exponentials. Issues two all-reduces: of [n] (the maxima) and of [2, n] (the
    sums).
    """
    maximum = all_reduce(statistics.maximum, columns.tp_group, dist.ReduceOp.MAX)
    sums, share = _run(columns, summands_of, *statistics, maximum, labels.here)
    all_reduce_(sums, columns.tp_group)
    losses, log_sum = _run(columns, losses_of, sums, maximum)
    return losses, share.div_(sums[1]) if columns.kernels is None else log_sum


def summands_of(
    own_maximum: Tensor, total: Tensor, at_label: Tensor, maximum: Tensor, here: Tensor
) -> Tensors:
    """Returns this rank's parts of two sums over ranks, [2, n]: of the label's logit and of the
    exponentials, both relative to the maximum of all ranks; and the latter part alone."""
    # Each rank took its exponentials relative to its own maximum. A rank with padding alone has
    # the maximum -inf, and exp(-inf) = 0 is its part of the sum.
    share = total * (own_maximum - maximum).exp_()
    return torch.stack((torch.where(here, at_label - maximum, 0.0), share)), share


def losses_of(sums: Tensor, maximum: Tensor) -> Tensors:
    """Returns log(sum of exp(x - maximum)) - (x_label - maximum) and log(sum of exp(x))."""
    log_sum = sums[1].log()
    return log_sum - sums[0], log_sum + maximum


def write_gradient_(
    logits: Tensor, grad_losses: Tensor, share: Tensor, labels: LocalLabels, columns: Columns
) -> None:
    """Overwrites the logits [n, V/t] with their gradient; capped ones with that before the cap.

    grad_losses: [n], the incoming gradient of each row's loss. share: [n], the second result of
        `combined`.
    """
    num_ids = columns.num_ids
    if num_ids and columns.kernels is not None:
        settings = dict(num_ids=num_ids, cap=columns.cap)
        _run(columns, overwrite_rows_, logits, grad_losses, share, *labels, **settings)
        return
    # The gradient of a row is dloss (softmax - one_hot). The softmax over the columns of all ranks
    # is `share` times the softmax over this rank's columns.
    grad, column = grad_losses.to(share.dtype), labels.column.unsqueeze(-1)
    softmax, at_label = (grad * share).unsqueeze(-1), (-grad * labels.here).unsqueeze(-1)
    logits[:, num_ids:] = -torch.inf  # those of a loss chunk are new
    count, width = logits.shape
    step = rows_at_a_time(count, width, logits.device.type)
    for start in range(0, count if num_ids else 0, step):
        part = slice(start, start + step)
        # No name holds the gradient of some rows while that of the next ones is made.
        grad_rows = (
            torch.softmax(logits[part], -1, dtype=softmax.dtype)
            .mul_(softmax[part])
            .scatter_add_(-1, column[part], at_label[part])
        )
        if columns.cap is not None:
            tanh = logits[part].to(grad_rows.dtype, copy=True).div_(columns.cap)
            torch.ops.aten.tanh_backward.grad_input(grad_rows, tanh, grad_input=grad_rows)
            del tanh
        logits[part] = grad_rows
        del grad_rows
    logits[:, num_ids:] = 0.0


def _run(columns: Columns, function: Callable[..., Any], *tensors: Tensor, **settings: Any) -> Any:
    """Runs a function of rows as a compiled graph; as it is if autograd is to see it."""
    if columns.kernels is None or torch.is_grad_enabled():
        return function(*tensors, **settings)
    return columns.kernels(function, *tensors, **settings)


def statistics_of_rows(logits: Tensor, column: Tensor, *, num_ids: int) -> Tensors:
    """Returns the fields of RowStatistics, by operators that inductor fuses into one pass."""
    wide = _true_columns(logits, num_ids, at_least_float32(logits.dtype))
    maximum = wide.amax(-1, keepdim=True)
    total = (wide - maximum).exp().sum(-1)
    at_label = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).to(wide.dtype)
    return maximum.squeeze(-1), total, at_label


def overwrite_rows_(
    logits: Tensor,
    grad_losses: Tensor,
    log_sum: Tensor,
    column: Tensor,
    here: Tensor,
    *,
    num_ids: int,
    cap: float | None,
) -> None:
    """Overwrites the logits with dloss (exp(logit - log_sum) - one_hot), before their cap.

    log_sum: [n], the log of the sum of exponentials. column, here: the fields of LocalLabels.
    It is pointwise: inductor makes one kernel of it, which needs no further tensor.
    """
    wide = _true_columns(logits, num_ids, log_sum.dtype)
    places = torch.arange(logits.shape[1], device=logits.device)
    one_hot = (places == column.unsqueeze(-1)) & here.unsqueeze(-1)
    softmax = (wide - log_sum.unsqueeze(-1)).exp()
    grad = (softmax - one_hot.to(wide.dtype)) * grad_losses.unsqueeze(-1).to(wide.dtype)
    if cap is not None:
        grad = grad * (1.0 - (logits.to(wide.dtype) / cap).square())
    logits.copy_(grad)


def _true_columns(logits: Tensor, num_ids: int, dtype: torch.dtype) -> Tensor:
    """Returns the logits in this dtype, and -inf in the columns of the padding."""
    wide = logits.to(dtype)
    if num_ids == logits.shape[1]:
        return wide
    places = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(places < num_ids, wide, -torch.inf)
