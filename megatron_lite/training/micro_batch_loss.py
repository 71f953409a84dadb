"""The loss of a micro-batch, and the gradient that each of its token losses gets.

The loss is linear in the token losses. The gradient of each token's loss is therefore known before
the forward, from the factors and the loss mask alone. A loss in one pass
(tensor_parallel/linear_cross_entropy.py) computes the gradients of the head from it in forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_lite.model.gpt import LossGradient
from megatron_lite.optim.loss_scale import scale_backward


@dataclass(frozen=True, kw_only=True)
class MicroBatchLoss:
    """How the token losses of each micro-batch of a step become its loss.

    factor: the factor on each micro-batch's mean loss.
    mask_factors: [m], for micro-batches with a loss mask: the factor on the gradients of each one's
        sum of masked losses. The sum itself has no factor. None: no factor on the gradients either.
    scale: the 0-d factor on all gradients. None leaves them as they are.
    in_one_pass: whether forward computes the gradients of the head.
    dtype: that of the token losses.
    """

    factor: float
    mask_factors: Tensor | None = None
    scale: Tensor | None = None
    in_one_pass: bool = False
    dtype: torch.dtype = torch.float32

    def of(self, losses: Tensor, mask: Tensor | None, number: int) -> Tensor:
        """Returns the loss of micro-batch `number`, 0-d, from its token losses [b, s].

        mask: [b, s], the loss mask. None: all tokens count.
        """
        if mask is None:
            return scale_backward(losses.mean() * self.factor, self.scale)
        total = (losses * mask).sum()
        if self.mask_factors is not None:
            scale_backward(total, self.mask_factors[number])
        return scale_backward(total, self.scale)

    def gradient(self, labels: Tensor, mask: Tensor | None, number: int) -> LossGradient | None:
        """Returns a function that computes the gradient of the token losses, for GPTModel.losses.

        labels, mask: [b, s], those of micro-batch `number`.
        None: backward computes the gradient.
        """
        if not self.in_one_pass:
            return None
        return partial(self._gradient, labels, mask, number)

    def _gradient(self, labels: Tensor, mask: Tensor | None, number: int) -> Tensor:
        """Returns the gradient of the token losses, [b, s].

        These are the operations of autograd's backward of `of`, in the same order, so the bits are
        the same.
        """
        grad = torch.ones((), dtype=self.dtype, device=labels.device)
        if mask is None:
            grad = grad if self.scale is None else self.scale.mul(grad)
            grad = grad * self.factor
            return (grad / labels.numel()).expand(labels.shape)
        if self.mask_factors is not None:
            grad = self.mask_factors[number].mul(grad)
        grad = grad if self.scale is None else self.scale.mul(grad)
        return grad * mask
