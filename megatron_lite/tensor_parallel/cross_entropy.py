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
    Computed in float32. Forward: all-reduces of three [s, b] tensors (maximum, then label logit and sum of exponentials in
    one). Keeps the logits (in their own dtype), labels and the log-sum-exp.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, tp_group, first_id, num_ids)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp_group: ProcessGroup | None, first_id: int,
                num_ids: int) -> Tensor:
        true_logits = logits[..., :num_ids]
        accumulate = torch.float64 if logits.dtype == torch.float64 else torch.float32
        local = labels - first_id
        mine = (local >= 0) & (local < num_ids)
        # [s, b]; a rank may hold nothing but padding
        maximum = true_logits.amax(-1).to(accumulate) if num_ids else logits.new_full(labels.shape, -torch.inf, dtype=accumulate)
        all_reduce_(maximum, tp_group, dist.ReduceOp.MAX)
        sums = maximum.new_zeros((2, *labels.shape))  # label logit; sum of exponentials
        if num_ids:
            at_label = true_logits.gather(-1, local.clamp(0, num_ids - 1).unsqueeze(-1)).squeeze(-1)
            sums[0] = torch.where(mine, at_label.to(accumulate) - maximum, 0.0)
            sums[1] = (true_logits.to(accumulate) - maximum.unsqueeze(-1)).exp_().sum(-1)
        all_reduce_(sums, tp_group)
        log_sum = sums[1].log_()
        ctx.save_for_backward(logits, local, mine, log_sum + maximum)
        ctx.num_ids = num_ids
        return log_sum - sums[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, mine, log_sum_exp = ctx.saved_tensors
        num_ids = ctx.num_ids
        # softmax - one_hot(label), times the incoming gradient; padding columns stay 0.
        grad = (logits[..., :num_ids].to(log_sum_exp.dtype) - log_sum_exp.unsqueeze(-1)).exp_()
        if num_ids:
            index = local.clamp(0, num_ids - 1).unsqueeze(-1)
            grad.scatter_add_(-1, index, -mine.unsqueeze(-1).to(grad.dtype))
        grad.mul_(grad_output.unsqueeze(-1))
        if num_ids == logits.shape[-1]:
            return grad.to(logits.dtype), None, None, None, None
        padded = torch.zeros_like(logits)
        padded[..., :num_ids] = grad
        return padded, None, None, None, None
