"""The output projection and its cross-entropy, a chunk of tokens at a time: logits [s, b, V/t] never exist, only [N, V/t].

    forward     per chunk of N tokens   logits = x A^T, row statistics             then all-reduces of all rows at once
    backward    per chunk               logits again, overwritten by their gradient g,   dx = g A,   dA += g^T x
                beside the last dA      all-reduce or reduce-scatter of dx

Costs a fourth matmul beside the three of a linear layer. What would spare it, taking both gradients in forward, is right only for
one gradient that all losses share: dA sums over tokens, so each token's incoming gradient must be known before. cross_entropy.py
has the arithmetic of the rows, and column_linear.py the same linear layer with its logits kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import all_gather_first_dim, start_all_reduce_, start_reduce_scatter_first_dim
from megatron_lite.tensor_parallel.column_linear import autocast_operands
from megatron_lite.tensor_parallel.cross_entropy import (
    LocalLabels,
    RowStatistics,
    cached_rows,
    combined,
    gradient_factors,
    local_labels,
    row_statistics,
    write_gradient_,
)


def vocab_parallel_linear_cross_entropy(hidden_states: Tensor, weight: Tensor, labels: Tensor, *, chunk_size: int,
                                        tp_group: ProcessGroup | None, sequence_parallel: bool, first_id: int,
                                        num_ids: int) -> Tensor:
    """vocab_parallel_cross_entropy of column_parallel_linear: the losses [s, b], for any incoming gradient of each.

    hidden_states: [s/t under sequence parallelism else s, b, h]. weight: [padded V / t, h]. labels, first_id, num_ids: as there.
    chunk_size: how many of the s b tokens, in that order, have logits at a time; the last chunk may be shorter.
    Keeps hidden_states, the weight, and of the logits only the labels, one byte per label and this rank's share of each softmax.
    Sends what those two send, in as many collectives, whatever the chunk size. RuntimeError under create_graph.
    dA is summed over the chunks in float32 (float64); for a bf16 weight each chunk's part is rounded to bf16 before, and
    the sum is a [V/t, h] float32 tensor that lives until autograd has added it to the weight's gradient.
    """
    operands = autocast_operands(hidden_states, weight, None)
    return _VocabParallelLinearCrossEntropy.apply(operands.hidden_states, operands.weight, labels, chunk_size, tp_group,
                                                  sequence_parallel, first_id, num_ids)


class _VocabParallelLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, labels: Tensor, chunk_size: int, tp_group: ProcessGroup | None,
                sequence_parallel: bool, first_id: int, num_ids: int) -> Tensor:
        local = local_labels(labels, first_id, num_ids)
        whole = all_gather_first_dim(hidden_states, tp_group) if sequence_parallel else hidden_states
        parts = [row_statistics(logits[:, :num_ids], local.column[tokens])
                 for tokens, logits in _logits_by_chunk(whole.flatten(0, 1), weight, chunk_size)]
        losses, share = combined(RowStatistics(*map(torch.cat, zip(*parts, strict=True))), local, tp_group)
        ctx.save_for_backward(hidden_states, weight, *local, share)
        ctx.chunk_size, ctx.tp_group, ctx.sequence_parallel, ctx.num_ids = chunk_size, tp_group, sequence_parallel, num_ids
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight, column, here, share = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        factors = gradient_factors(grad_output, share, LocalLabels(column, here))
        whole = all_gather_first_dim(hidden_states, ctx.tp_group) if ctx.sequence_parallel else hidden_states
        rows = whole.flatten(0, 1)
        grad_rows = torch.empty_like(rows) if needs_input else None
        grad_weight = torch.empty_like(weight, dtype=share.dtype) if needs_weight else None
        reduction = None
        for tokens, logits in _logits_by_chunk(rows, weight, ctx.chunk_size):
            write_gradient_(logits, logits, factors.of_rows(tokens), num_ids=ctx.num_ids)
            if grad_rows is not None:
                torch.mm(logits, weight, out=grad_rows[tokens])
                if tokens.stop == rows.shape[0]:
                    start = start_reduce_scatter_first_dim if ctx.sequence_parallel else start_all_reduce_
                    reduction = start(grad_rows.view(whole.shape), ctx.tp_group)
            if grad_weight is not None:
                _add_product_(grad_weight, logits.t(), rows[tokens], first=tokens.start == 0)
        return None if reduction is None else reduction.wait(), grad_weight, *[None] * 6


class _ChunkOfLogits(NamedTuple):
    """tokens: which rows. logits: [N, V/t], overwritten by the next chunk's."""

    tokens: slice
    logits: Tensor


def _logits_by_chunk(rows: Tensor, weight: Tensor, chunk_size: int) -> Iterator[_ChunkOfLogits]:
    """[n, h], [V/t, h] -> the logits of all rows, in one buffer: a new one for each would cost its page faults on a CPU."""
    num_rows = rows.shape[0]
    buffer = rows.new_empty((min(chunk_size, num_rows), weight.shape[0]))
    for start in range(0, num_rows, chunk_size):
        tokens = slice(start, min(start + chunk_size, num_rows))
        yield _ChunkOfLogits(tokens, torch.mm(rows[tokens], weight.t(), out=buffer[: tokens.stop - start]))


def _add_product_(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """Adds left x right to the total, which is not read if `first`. A bf16 product is added while it is still in the cache."""
    if total.dtype == right.dtype:
        torch.addmm(total, left, right, beta=0 if first else 1, out=total)
        return
    for part in cached_rows(total):
        write_ = total[part].copy_ if first else total[part].add_
        write_(left[part].mm(right))
