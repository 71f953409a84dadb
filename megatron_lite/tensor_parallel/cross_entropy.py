"""Cross-entropy over logits whose vocabulary is split over the TP ranks; the logits are never gathered."""

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
    Computed in that dtype, a chunk of rows at a time: no such copy of all logits exists.
    Forward: all-reduces of three [s, b] tensors (maximum, then label logit and sum of exponentials in one). Keeps the logits
    (in their own dtype), the labels, one byte per label, and per row this rank's share of the softmax.
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
        here = _sum_of_exponentials(rows, accumulate)
        maximum = all_reduce(here.maximum, tp_group, dist.ReduceOp.MAX)
        sums = torch.zeros((2, *local.shape), dtype=accumulate, device=logits.device)  # label logit; sum of exponentials
        if num_ids:
            at_label = rows.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(accumulate)
            sums[0] = torch.where(mine, at_label - maximum, 0.0)
        sums[1] = here.total * (here.maximum - maximum).exp_()
        share = sums[1].clone()  # this rank's part of the softmax's mass: 1 for a group of one
        all_reduce_(sums, tp_group)
        ctx.save_for_backward(logits, local, mine, share.div_(sums[1]))
        ctx.num_ids = num_ids
        return (sums[1].log() - sums[0]).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """(softmax - one_hot(label)) times the incoming gradient; 0 for padding columns."""
        logits, local, mine, share = ctx.saved_tensors
        num_ids, columns = ctx.num_ids, logits.shape[-1]
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        grad_rows, rows = grad.view(-1, columns), logits.flatten(0, 1)[:, :num_ids]
        grad_rows[:, num_ids:] = 0.0
        if num_ids:
            grad_loss = grad_output.flatten().to(share.dtype)
            scale, at_label = (grad_loss * share).unsqueeze(-1), (-grad_loss * mine).unsqueeze(-1)
            for chunk in _chunks(rows):
                softmax = torch.softmax(rows[chunk], -1, dtype=share.dtype).mul_(scale[chunk])
                grad_rows[chunk, :num_ids] = softmax.scatter_add_(-1, local[chunk].unsqueeze(-1), at_label[chunk])
        return grad, None, None, None, None


class _Exponentials(NamedTuple):
    """Per row: the maximum, and the sum of exp(logit - maximum); -inf and 0 for rows without columns."""

    maximum: Tensor
    total: Tensor


def _sum_of_exponentials(rows: Tensor, dtype: torch.dtype) -> _Exponentials:
    """[n, ids] -> two of [n]. The largest softmax of a row is 1 / total, and torch's softmax is faster than its exp."""
    maximum = torch.full(rows.shape[:1], -torch.inf, dtype=dtype, device=rows.device)
    total = torch.zeros_like(maximum)
    for chunk in _chunks(rows) if rows.shape[1] else ():
        maximum[chunk] = rows[chunk].amax(-1).to(dtype)
        total[chunk] = torch.softmax(rows[chunk], -1, dtype=dtype).amax(-1).reciprocal_()
    return _Exponentials(maximum, total)


def _chunks(rows: Tensor) -> list[slice]:
    """Row ranges whose float32 form stays in a CPU core's cache, or takes at most 256 MiB of a GPU."""
    limit = 2**20 if rows.device.type == "cpu" else 2**28
    step = max(1, limit // (4 * rows.shape[-1]))
    return [slice(start, start + step) for start in range(0, rows.shape[0], step)]
