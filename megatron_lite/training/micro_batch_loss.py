"""The loss of a micro-batch, and the gradient that each of its token losses gets.

The loss is linear in the token losses. The gradient of each token's loss is therefore known before
the forward, from the factors and the loss mask alone. A loss in one pass
(tensor_parallel/cross_entropy.py) computes the gradients of the head from it in forward.
"""

from __future__ import annotations

from dataclasses import dataclass

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

        def of_any_losses() -> Tensor:
            # The loss is linear, so its gradient is that at any values of the token losses.
            with torch.enable_grad():
                losses = torch.zeros(
                    labels.shape, dtype=self.dtype, device=labels.device, requires_grad=True
                )
                return torch.autograd.grad(self.of(losses, mask, number), losses)[0]

        return of_any_losses if self.in_one_pass else None
