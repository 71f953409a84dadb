"""The output projection and its cross-entropy, computed for one loss chunk at a time.

All logits [s, b, V/t] never exist at once, only those of a loss chunk, [N, V/t], where N is
--loss-chunk-size.

    forward    each chunk of N tokens   logits = x A^T, row statistics
               all rows at once         all-reduces of the statistics
    backward   each chunk               logits again, overwritten by their gradient g
                                        dx = g A,  dA += g^T x
               beside the last dA       all-reduce or reduce-scatter of dx

A linear layer has three matmuls; these two passes have a fourth, for the logits in backward. dA
sums over tokens, so the incoming gradient of each token's loss must be known before the sum. If it
is known in forward (`grad_losses`), and the weight has a sum of gradients to add to, one pass over
the chunks computes everything:

    forward    each chunk of N tokens   logits = x A^T, row statistics
                                        all-reduces of the statistics
                                        logits overwritten by their gradient g
                                        dx = g A,  dA += g^T x
               beside the last dA       all-reduce or reduce-scatter of dx
    backward                            (returns dx)

The arithmetic of the rows is in cross_entropy.py. The same linear layer with its logits kept is in
column_linear.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import (
    all_gather_first_dim,
    start_all_reduce_,
    start_reduce_scatter_first_dim,
)
from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.parallel.products import add_weight_product_
from megatron_lite.parallel.weight_gradient import OwnSum, own_sum, weight_gradient
from megatron_lite.tensor_parallel.column_linear import autocast_operands
from megatron_lite.tensor_parallel.cross_entropy import (
    LocalLabels,
    RowStatistics,
    combined,
    gradient_factors,
    local_labels,
    row_statistics,
    write_gradient_,
)


def vocab_parallel_linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    loss_chunk_size: int,
    tp_group: ProcessGroup | None,
    sequence_parallel: bool,
    first_id: int,
    num_ids: int,
    grad_losses: Callable[[], Tensor] | None = None,
    kernels: CompiledKernels | None = None,
) -> Tensor:
    """Returns the losses [s, b] of the output projection, without ever holding all logits.

    The result equals vocab_parallel_cross_entropy of column_parallel_linear. Each loss may have its
    own incoming gradient. Raises RuntimeError under create_graph.

    hidden_states: [s, b, h], under sequence parallelism [s/t, b, h].
    weight: [padded V / t, h].
    labels, first_id, num_ids, kernels: see vocab_parallel_cross_entropy.
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
    rounded to bf16 before the sum; CUDA adds it unrounded (parallel/products.py). The sum is a
    [V/t, h] float32 tensor that lives until autograd has added it to the weight's gradient. If the
    weight has a float32 sum (parallel/weight_gradient.py), each chunk's part is added to it at
    once, and that tensor does not exist.

    A product of fewer rows may sum in another order, so chunks can change low bits. In bf16 the
    losses and the gradient of hidden_states are as exact as without chunks. Where the parts are
    rounded, the error of dA is at most 1.5 times that of the unchunked dA, and its norm is right
    within 2^-9. A test compares them with float64 on a grid.
    """
    operands = autocast_operands(hidden_states, weight, None)
    add = own_sum(operands.weight) if _has_backward() else None
    if grad_losses is not None and add is not None:
        return _InOnePass.apply(
            operands.hidden_states,
            operands.weight,
            labels,
            grad_losses,
            add,
            loss_chunk_size,
            tp_group,
            sequence_parallel,
            first_id,
            num_ids,
            kernels,
        )
    return _VocabParallelLinearCrossEntropy.apply(
        operands.hidden_states,
        operands.weight,
        labels,
        loss_chunk_size,
        tp_group,
        sequence_parallel,
        first_id,
        num_ids,
        kernels,
    )


class _VocabParallelLinearCrossEntropy(torch.autograd.Function):
    """The loss in two passes over the chunks: hidden_states [s/t or s, b, h] -> losses [s, b].

    Both directions gather hidden_states under sequence parallelism. Forward issues two all-reduces
    of the statistics; backward issues the sum of dx.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_chunk_size: int,
        tp_group: ProcessGroup | None,
        sequence_parallel: bool,
        first_id: int,
        num_ids: int,
        kernels: CompiledKernels | None,
    ) -> Tensor:
        local = local_labels(labels, first_id, num_ids)
        whole = (
            all_gather_first_dim(hidden_states, tp_group) if sequence_parallel else hidden_states
        )
        parts = []
        for tokens, logits in _logits_by_chunk(whole.flatten(0, 1), weight, loss_chunk_size):
            parts.append(row_statistics(logits, local.column[tokens], num_ids, kernels))
            del logits  # which would hold the buffer after the loop
        losses, share = combined(
            RowStatistics(*map(torch.cat, zip(*parts, strict=True))), local, tp_group
        )
        ctx.save_for_backward(hidden_states, weight, *local, share)
        ctx.add = own_sum(weight)
        ctx.loss_chunk_size = loss_chunk_size
        ctx.tp_group = tp_group
        ctx.sequence_parallel = sequence_parallel
        ctx.num_ids, ctx.kernels = num_ids, kernels
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight, column, here, share = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        factors = gradient_factors(grad_output, share, LocalLabels(column, here))
        whole = (
            all_gather_first_dim(hidden_states, ctx.tp_group)
            if ctx.sequence_parallel
            else hidden_states
        )
        rows = whole.flatten(0, 1)
        grad_rows = torch.empty_like(rows) if needs_input else None
        grad_weight = (
            torch.empty_like(weight, dtype=share.dtype)
            if needs_weight and ctx.add is None
            else None
        )
        reduction = None
        # Each chunk's logits are computed again and overwritten with their gradient. After the last
        # chunk's dx the reduction starts, and runs beside that chunk's dA.
        for tokens, logits in _logits_by_chunk(rows, weight, ctx.loss_chunk_size):
            write_gradient_(
                logits, factors.of_rows(tokens), num_ids=ctx.num_ids, kernels=ctx.kernels
            )
            if grad_rows is not None:
                torch.mm(logits, weight, out=grad_rows[tokens])
                if tokens.stop == rows.shape[0]:
                    start = (
                        start_reduce_scatter_first_dim
                        if ctx.sequence_parallel
                        else start_all_reduce_
                    )
                    reduction = start(grad_rows.view(whole.shape), ctx.tp_group)
            if grad_weight is not None:
                add_weight_product_(grad_weight, rows[tokens], logits, first=tokens.start == 0)
            elif needs_weight:
                weight_gradient(ctx.add, rows[tokens], logits)
            del logits
        return None if reduction is None else reduction.wait(), grad_weight, *[None] * 7


def _has_backward() -> bool:
    """Returns whether a backward will follow. If not, no gradient may be added to a sum."""
    return torch.is_grad_enabled()


class _InOnePass(torch.autograd.Function):
    """The loss in one pass: hidden_states [s/t or s, b, h] -> losses [s, b]. Keeps dx alone.

    Forward issues all collectives: the gather of hidden_states under sequence parallelism, two
    all-reduces for each chunk, and the sum of dx. Backward returns dx.
    """

    # The weight is an argument, although its gradient is None: autograd then runs the hooks of the
    # weight in backward, once the other parts of its gradient have arrived too. Those hooks send
    # the sum to other ranks.
    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        grad_losses: Callable[[], Tensor],
        add: OwnSum,
        loss_chunk_size: int,
        tp_group: ProcessGroup | None,
        sequence_parallel: bool,
        first_id: int,
        num_ids: int,
        kernels: CompiledKernels | None,
    ) -> Tensor:
        local = local_labels(labels, first_id, num_ids)
        whole = (
            all_gather_first_dim(hidden_states, tp_group) if sequence_parallel else hidden_states
        )
        rows = whole.flatten(0, 1)
        grad = grad_losses().flatten()
        losses = torch.empty_like(
            local.column, dtype=torch.promote_types(torch.float32, rows.dtype)
        )
        grad_rows = torch.empty_like(rows)
        reduction = None
        for tokens, logits in _logits_by_chunk(rows, weight, loss_chunk_size):
            own = LocalLabels(local.column[tokens], local.here[tokens])
            losses[tokens] = _turned_into_gradient_(
                logits, own, grad[tokens], tp_group, num_ids, kernels
            )
            torch.mm(logits, weight, out=grad_rows[tokens])
            if tokens.stop == rows.shape[0]:
                start = start_reduce_scatter_first_dim if sequence_parallel else start_all_reduce_
                reduction = start(grad_rows.view(whole.shape), tp_group)
            weight_gradient(add, rows[tokens], logits)
            del logits
        assert reduction is not None  # there is a token
        ctx.save_for_backward(reduction.wait())
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (grad_hidden_states,) = ctx.saved_tensors
        return grad_hidden_states, *[None] * 10


def _turned_into_gradient_(
    logits: Tensor,
    labels: LocalLabels,
    grad_losses: Tensor,
    tp_group: ProcessGroup | None,
    num_ids: int,
    kernels: CompiledKernels | None,
) -> Tensor:
    """Overwrites the logits [N, V/t] of a chunk with their gradient. Returns the losses [N].

    grad_losses: [N], the incoming gradient of each loss. Issues two all-reduces.
    """
    # no name holds the statistics, so they are freed before the gradient is made
    losses, share = combined(
        row_statistics(logits, labels.column, num_ids, kernels), labels, tp_group
    )
    factors = gradient_factors(grad_losses, share, labels)
    write_gradient_(logits, factors, num_ids=num_ids, kernels=kernels)
    return losses


class _ChunkOfLogits(NamedTuple):
    """The logits of one chunk of tokens.

    tokens: the rows of the chunk.
    logits: [N, V/t]. The next chunk overwrites them.
    """

    tokens: slice
    logits: Tensor


def _logits_by_chunk(
    rows: Tensor, weight: Tensor, loss_chunk_size: int
) -> Iterator[_ChunkOfLogits]:
    """Yields the logits of `rows` [n, h] with `weight` [V/t, h], one chunk at a time.

    All chunks share one buffer.
    """
    num_rows = rows.shape[0]
    buffer = rows.new_empty((min(loss_chunk_size, num_rows), weight.shape[0]))
    for start in range(0, num_rows, loss_chunk_size):
        tokens = slice(start, min(start + loss_chunk_size, num_rows))
        logits = buffer[: tokens.stop - start]
        yield _ChunkOfLogits(tokens, torch.mm(rows[tokens], weight.t(), out=logits))
