"""Cross-entropy over logits whose vocabulary is sharded over the TP ranks.

The logits are never gathered. The steps are those of any rows of logits:

    row_statistics    this rank's columns: the maximum, the sum of exponentials, the label's logit
    combined          two all-reduces of these, then the losses
    write_gradient_   this rank's columns: softmax - one_hot

`vocab_parallel_cross_entropy` takes the logits of all tokens and keeps them for backward.
`vocab_parallel_linear_cross_entropy` takes the operands of the output projection y = x A^T. It
computes the logits of one loss chunk at a time, [N, V/t] with N = --loss-chunk-size.

    two passes   forward    each chunk   logits = x A^T, row statistics
                            all rows     all-reduces of the statistics
                 backward   each chunk   logits again, overwritten by their gradient g
                                         dx = g A,  dA += g^T x
                            beside the last dA    all-reduce or reduce-scatter of dx
    one pass     forward    each chunk   logits, statistics, all-reduces, g, dx and dA as above
                 backward                (returns dx)

A linear layer has three matmuls; two passes have a fourth, for the logits in backward. dA sums over
tokens, so one pass needs the incoming gradient of each token's loss in forward.

Under --torch-compile the steps on rows are compiled graphs for all rows at once: one reads the
logits for their statistics, and one writes the gradient over them. It needs of all ranks' columns
the log of the sum of exponentials, which takes the place of the share. Otherwise torch's operators
take a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.config.row_blocks import rows_at_a_time
from megatron_lite.parallel.collectives import (
    all_gather_first_dim,
    all_reduce,
    all_reduce_,
    start_all_reduce_,
    start_reduce_scatter_first_dim,
)
from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.parallel.torch_internals import backward_keeps_graph
from megatron_lite.parallel.weight_gradient import (
    OwnSum,
    add_weight_product_,
    in_autocast_dtype,
    own_sum,
    weight_gradient,
)


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

    tp_group: ProcessGroup | None
    first_id: int
    num_ids: int
    kernels: CompiledKernels | None = None
    cap: float | None = None

    def capped_(self, logits: Tensor) -> Tensor:
        """Overwrites the logits with capped ones, which are kept and read in their place."""
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, columns: Columns, *, overwrite_logits: bool = False
) -> Tensor:
    """Returns the negative log-likelihood of each label, [s, b], the same on every TP rank.

    The losses are float32 (float64 for float64 logits). The computation has this dtype too. It
    covers a few rows at a time, or is one compiled graph, so no copy of all logits in this dtype
    exists.

    logits: [s, b, padded V / t], this rank's columns.
    labels: [s, b], global ids, each below the true V.
    overwrite_logits: whether backward writes the gradient over the logits, so that it needs no
        second tensor of their size. The caller must not read the logits afterwards. A backward
        that keeps the graph (retain_graph, create_graph) does not overwrite them.

    Forward issues two all-reduces: one of the maxima [s, b], and one of the label logits and the
    sums of exponentials [2, s b]. Backward issues none.
    Keeps the logits (in their own dtype), the labels, one byte per label, and for each row this
    rank's share of the softmax, or with compiled graphs the log of the sum of exponentials.
    """
    return _CrossEntropy.apply(logits, labels, columns, overwrite_logits)


def vocab_parallel_linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    columns: Columns,
    *,
    loss_chunk_size: int,
    sequence_parallel: bool,
    grad_losses: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Returns the losses [s, b] of the output projection, without ever holding all logits.

    The result equals vocab_parallel_cross_entropy of parallel_linear. Each loss may have its
    own incoming gradient. Raises RuntimeError under create_graph.

    hidden_states: [s, b, h], under sequence parallelism [s/t, b, h].
    weight: [padded V / t, h].
    labels: see vocab_parallel_cross_entropy.
    loss_chunk_size: the number of tokens that have logits at a time. The s b tokens are taken in
        this order, and the last chunk may be shorter.
    grad_losses: returns the incoming gradient [s, b] that backward will bring. Forward then
        computes the gradients in the same pass, if gradients are on and the weight has a sum of
        gradients (parallel/weight_gradient.py). It adds dA to that sum at once, so each such
        forward needs its backward in the same step. Backward ignores its incoming gradient.

    In one pass the bits of dx and dA are those of two passes. It issues the two all-reduces once
    for each chunk, and the collective of dx in forward. It keeps dx alone.

    In two passes it issues the collectives of those two functions, in the same number at every
    chunk size. It keeps hidden_states and the weight. In place of the logits it keeps the labels,
    one byte per label and this rank's share of each softmax.

    dA is summed over the chunks in float32 (float64). On a CPU a bf16 weight has each chunk's part
    rounded to bf16 before the sum; CUDA adds it unrounded. The sum is a [V/t, h] float32 tensor
    that lives until autograd has added it to the weight's gradient. If the weight has a float32 sum
    (parallel/weight_gradient.py), each chunk's part is added to it at once, and that tensor does
    not exist.

    A product of fewer rows may sum in another order, so chunks can change low bits. In bf16 the
    losses and the gradient of hidden_states are as exact as without chunks. Where the parts are
    rounded, the error of dA is at most 1.5 times that of the unchunked dA, and its norm is right
    within 2^-9. A test compares them with float64 on a grid.
    """
    if torch.is_autocast_enabled(hidden_states.device.type):
        hidden_states, weight = in_autocast_dtype(hidden_states, weight)
    head = _Head(columns, loss_chunk_size, sequence_parallel, own_sum(weight))
    if head.add is None or not torch.is_grad_enabled():  # without a backward nothing may be added
        grad_losses = None
    return _LinearCrossEntropy.apply(hidden_states, weight, labels, head, grad_losses)


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


class _CrossEntropy(torch.autograd.Function):
    """The loss of logits: [s, b, V/t] -> [s, b]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, columns: Columns, overwrite_logits: bool
    ) -> Tensor:
        local = local_labels(labels, columns)
        if columns.cap is not None:
            logits = columns.capped_(logits if overwrite_logits else logits.clone())
        statistics = row_statistics(logits.flatten(0, 1), local, columns)
        losses, share = combined(statistics, local, columns)
        ctx.save_for_backward(logits, *local, share)
        ctx.columns, ctx.overwrite_logits = columns, overwrite_logits
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
        labels = LocalLabels(column, here)
        write_gradient_(grad.flatten(0, 1), grad_output.flatten(), share, labels, ctx.columns)
        return grad, None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of the output projection: [s/t or s, b, h] -> [s, b].

    One pass over the chunks if grad_losses is given. It then keeps dx alone. The weight is an
    argument also then, although its gradient is None: autograd runs the hooks of the weight in
    backward, once the other parts of its gradient have arrived too. Those hooks send the sum to
    other ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        head: _Head,
        grad_losses: Callable[[], Tensor] | None,
    ) -> Tensor:
        ctx.head, ctx.in_one_pass = head, grad_losses is not None
        columns, local = head.columns, local_labels(labels, head.columns)
        whole = head.whole(hidden_states)
        if grad_losses is None:
            parts = []
            for tokens, logits in head.logits(whole, weight):
                parts.append(row_statistics(logits, local.of(tokens), columns))
                del logits  # which would hold the buffer after the loop
            statistics = RowStatistics(*map(torch.cat, zip(*parts, strict=True)))
            losses, share = combined(statistics, local, columns)
            ctx.save_for_backward(hidden_states, weight, *local, share)
            return losses.view(labels.shape)
        grad = grad_losses().flatten()
        losses = torch.empty_like(grad)

        def write_(tokens: slice, logits: Tensor) -> None:
            own = local.of(tokens)
            # no name holds the statistics, so they are freed before the gradient is made
            losses[tokens], share = combined(row_statistics(logits, own, columns), own, columns)
            write_gradient_(logits, grad[tokens], share, own, columns)

        ctx.save_for_backward(head.gradients(whole, weight, write_)[0])
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.in_one_pass:
            return *ctx.saved_tensors, None, None, None, None
        head: _Head = ctx.head
        hidden_states, weight, column, here, share = ctx.saved_tensors
        grad, local = grad_output.flatten(), LocalLabels(column, here)

        def write_(tokens: slice, logits: Tensor) -> None:
            write_gradient_(logits, grad[tokens], share[tokens], local.of(tokens), head.columns)

        needed = ctx.needs_input_grad[:2]
        gradients = head.gradients(head.whole(hidden_states), weight, write_, *needed)
        return *gradients, None, None, None


class _Head(NamedTuple):
    """The output projection in chunks of loss_chunk_size tokens.

    add: the weight's own sum of gradients, if it has one.
    """

    columns: Columns
    loss_chunk_size: int
    sequence_parallel: bool
    add: OwnSum | None

    def whole(self, hidden_states: Tensor) -> Tensor:
        """Returns the hidden states of all tokens, [s, b, h]."""
        if not self.sequence_parallel:
            return hidden_states
        return all_gather_first_dim(hidden_states, self.columns.tp_group)

    def logits(self, whole: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields each chunk's tokens, and their logits [N, V/t]. All chunks share one buffer."""
        rows = whole.flatten(0, 1)
        num_rows = rows.shape[0]
        buffer = rows.new_empty((min(self.loss_chunk_size, num_rows), weight.shape[0]))
        for start in range(0, num_rows, self.loss_chunk_size):
            tokens = slice(start, min(start + self.loss_chunk_size, num_rows))
            logits = buffer[: tokens.stop - start]
            yield tokens, self.columns.capped_(torch.mm(rows[tokens], weight.t(), out=logits))

    def gradients(
        self,
        whole: Tensor,
        weight: Tensor,
        write_: Callable[[slice, Tensor], None],
        needs_input: bool = True,
        needs_weight: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradients of the hidden states and of the weight, each if it is needed.

        The weight's is None if it is added to the weight's own sum.
        write_: overwrites the logits of some tokens with their gradient.
        """
        rows = whole.flatten(0, 1)
        grad_rows = torch.empty_like(rows) if needs_input else None
        grad_weight, reduction = None, None
        if needs_weight and self.add is None:
            dtype = torch.promote_types(torch.float32, rows.dtype)
            grad_weight = torch.empty_like(weight, dtype=dtype)
        for tokens, logits in self.logits(whole, weight):
            write_(tokens, logits)
            if grad_rows is not None:
                torch.mm(logits, weight, out=grad_rows[tokens])
                if tokens.stop == rows.shape[0]:  # the reduction runs beside the last dA
                    start = (
                        start_reduce_scatter_first_dim
                        if self.sequence_parallel
                        else start_all_reduce_
                    )
                    reduction = start(grad_rows.view(whole.shape), self.columns.tp_group)
            if grad_weight is not None:
                add_weight_product_(grad_weight, rows[tokens], logits, first=tokens.start == 0)
            elif needs_weight:
                weight_gradient(self.add, rows[tokens], logits)
            del logits
        return None if reduction is None else reduction.wait(), grad_weight


def local_labels(labels: Tensor, columns: Columns) -> LocalLabels:
    """Returns the places of n global ids of any shape, [n] each."""
    settings = dict(first_id=columns.first_id, num_ids=columns.num_ids)
    return LocalLabels(*_run(columns, places_of, labels, **settings))


def places_of(labels: Tensor, *, first_id: int, num_ids: int) -> tuple[Tensor, Tensor]:
    """Returns the fields of LocalLabels."""
    local = labels.flatten() - first_id
    return local.clamp(0, max(num_ids - 1, 0)), (local >= 0) & (local < num_ids)


def row_statistics(logits: Tensor, labels: LocalLabels, columns: Columns) -> RowStatistics:
    """Returns the statistics of the logits [n, V/t]. Issues no collective."""
    num_ids = columns.num_ids
    if num_ids and columns.kernels is not None:
        of_rows = _run(columns, statistics_of_rows, logits, labels.column, num_ids=num_ids)
        return RowStatistics(*of_rows)
    rows = logits[:, :num_ids]
    dtype = torch.promote_types(torch.float32, rows.dtype)
    maximum = torch.full(rows.shape[:1], -torch.inf, dtype=dtype, device=rows.device)
    total, at_label = torch.zeros_like(maximum), torch.zeros_like(maximum)
    if num_ids:
        # The largest softmax of a row is 1 / total, and torch's softmax is faster than its exp.
        step = rows_at_a_time(rows.shape[0], num_ids, rows.device.type)
        for start in range(0, rows.shape[0], step):
            part = slice(start, start + step)
            maximum[part] = rows[part].amax(-1).to(dtype)
            total[part] = torch.softmax(rows[part], -1, dtype=dtype).amax(-1).reciprocal_()
        at_label = rows.gather(-1, labels.column.unsqueeze(-1)).squeeze(-1).to(dtype)
    return RowStatistics(maximum, total, at_label)


def combined(
    statistics: RowStatistics, labels: LocalLabels, columns: Columns
) -> tuple[Tensor, Tensor]:
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
) -> tuple[Tensor, Tensor]:
    """Returns this rank's parts of two sums over ranks, [2, n]: of the label's logit and of the
    exponentials, both relative to the maximum of all ranks; and the latter part alone."""
    # Each rank took its exponentials relative to its own maximum. A rank with padding alone has
    # the maximum -inf, and exp(-inf) = 0 is its part of the sum.
    share = total * (own_maximum - maximum).exp_()
    return torch.stack((torch.where(here, at_label - maximum, 0.0), share)), share


def losses_of(sums: Tensor, maximum: Tensor) -> tuple[Tensor, Tensor]:
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
    logits[:, num_ids:] = 0.0
    rows = logits[:, :num_ids]
    step = rows_at_a_time(rows.shape[0], num_ids, rows.device.type)
    for start in range(0, rows.shape[0] if num_ids else 0, step):
        part = slice(start, start + step)
        # No name holds the gradient of some rows while that of the next ones is made.
        grad_rows = (
            torch.softmax(rows[part], -1, dtype=softmax.dtype)
            .mul_(softmax[part])
            .scatter_add_(-1, column[part], at_label[part])
        )
        if columns.cap is not None:
            tanh = rows[part].to(grad_rows.dtype, copy=True).div_(columns.cap)
            torch.ops.aten.tanh_backward.grad_input(grad_rows, tanh, grad_input=grad_rows)
            del tanh
        rows[part] = grad_rows
        del grad_rows


def _run(columns: Columns, function: Callable[..., Any], *tensors: Tensor, **settings: Any) -> Any:
    """Runs a function of rows as a compiled graph; as it is if autograd is to see it."""
    if columns.kernels is None or torch.is_grad_enabled():
        return function(*tensors, **settings)
    return columns.kernels(function, *tensors, **settings)


def statistics_of_rows(
    logits: Tensor, column: Tensor, *, num_ids: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the fields of RowStatistics, by operators that inductor fuses into one pass."""
    wide = _true_columns(logits, num_ids, torch.promote_types(torch.float32, logits.dtype))
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
