"""Cross-entropy over logits whose vocabulary is split over the TP ranks; the logits are never gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import all_reduce_


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, *, tp_group: ProcessGroup | None, first_id: int,
                                 num_ids: int) -> Tensor:
    """The negative log-likelihood of each label, float32 [s, b], the same on every TP rank.

    logits: [s, b, padded V / t], this rank's columns. labels: [s, b], global ids, each below the true V.
    first_id: global id of column 0. num_ids: how many columns stand for true ids; the rest is padding, takes no part in the
    softmax and has gradient 0, so that the loss does not depend on the padding and so not on t.
    Computed in float32, a chunk of rows at a time: no float32 copy of all logits exists.
    Forward: all-reduces of three [s, b] tensors (maximum, then label logit and sum of exponentials in one). Keeps the logits
    (in their own dtype), labels, the maximum and the sum of exponentials.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, tp_group, first_id, num_ids)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp_group: ProcessGroup | None, first_id: int,
                num_ids: int) -> Tensor:
        rows, local = logits.flatten(0, 1)[:, :num_ids], labels.flatten() - first_id  # [n, ids], [n]; n = s b
        mine = (local >= 0) & (local < num_ids)
        local = local.clamp(0, max(num_ids - 1, 0))
        accumulate = torch.promote_types(torch.float32, logits.dtype)
        # A rank may hold nothing but padding.
        maximum = rows.amax(-1).to(accumulate) if num_ids else rows.new_full(local.shape, -torch.inf, dtype=accumulate)
        all_reduce_(maximum, tp_group, dist.ReduceOp.MAX)
        sums = maximum.new_zeros((2, *local.shape))  # label logit; sum of exponentials
        if num_ids:
            at_label = rows.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(accumulate)
            sums[0] = torch.where(mine, at_label - maximum, 0.0)
            for chunk in _chunks(rows):
                sums[1, chunk] = _exponentials(rows[chunk], maximum[chunk]).sum(-1)
        all_reduce_(sums, tp_group)
        # The two are kept apart: their sum would round large logits, and the softmax with them.
        ctx.save_for_backward(logits, local, mine, maximum, sums[1])
        ctx.num_ids = num_ids
        return (sums[1].log() - sums[0]).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """(softmax - one_hot(label)) times the incoming gradient; 0 for padding columns."""
        logits, local, mine, maximum, sum_of_exponentials = ctx.saved_tensors
        num_ids, columns = ctx.num_ids, logits.shape[-1]
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        grad_rows, rows = grad.view(-1, columns), logits.flatten(0, 1)[:, :num_ids]
        grad_rows[:, num_ids:] = 0.0
        if num_ids:
            grad_loss = grad_output.flatten().to(maximum.dtype)
            scale, at_label = (grad_loss / sum_of_exponentials).unsqueeze(-1), (-grad_loss * mine).unsqueeze(-1)
            for chunk in _chunks(rows):
                scaled_softmax = _exponentials(rows[chunk], maximum[chunk]).mul_(scale[chunk])
                grad_rows[chunk, :num_ids] = scaled_softmax.scatter_add_(-1, local[chunk].unsqueeze(-1), at_label[chunk])
        return grad, None, None, None, None


def _exponentials(rows: Tensor, shift: Tensor) -> Tensor:
    """exp(rows - shift) in the dtype of `shift`: [n, ids] and [n] -> [n, ids], a new tensor."""
    wide = rows.to(shift.dtype, copy=True)
    return wide.sub_(shift.unsqueeze(-1)).exp_()


def _chunks(rows: Tensor) -> list[slice]:
    """Row ranges whose float32 form stays in a CPU core's cache, or takes at most 256 MiB of a GPU."""
    limit = 2**20 if rows.device.type == "cpu" else 2**28
    step = max(1, limit // (4 * rows.shape[-1]))
    return [slice(start, start + step) for start in range(0, rows.shape[0], step)]
