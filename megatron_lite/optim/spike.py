"""The running mean of the loss, and the spikes above it: `--skip-update-on-spike K`.

    each update       mean += (loss - mean) / min(updates so far, 100)
                      It is the plain mean of the first 100 losses, and decays exponentially after.
    loss > K x mean   a spike, from 20 losses in the mean on: the step changes no weight

The loss of a skipped update does not move the mean, whatever the reason for the skip. A spike does
not lower the loss scale of a float16 run. Everything is a 0-d tensor on the device and nothing
waits for it. Every rank decides alike, from the same loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WINDOW = 100  # the losses that the mean covers
SETTLED = 20  # the losses that the mean needs before a loss is compared with it


@dataclass(frozen=True, kw_only=True)
class MeanLossState:
    """The running mean in a checkpoint. count: the losses in the mean, at most WINDOW."""

    mean: float
    count: int

    def __post_init__(self) -> None:
        if not math.isfinite(self.mean) or not 0 <= self.count <= WINDOW:
            raise ValueError(
                f"mean_loss.mean must be finite and count in [0, {WINDOW}] (got {self.mean} and "
                f"{self.count})"
            )


class SpikeGuard:
    """The running mean of the loss, by which it judges each loss.

    ratio: a loss above `ratio` times the mean is a spike.
    mean: 0-d float64. Each update writes into the tensor, which a CUDA graph reads.
    """

    mean: Tensor
    _count: Tensor

    def __init__(self, ratio: float, device: torch.device) -> None:
        self.ratio, self._device = ratio, device
        self._set(0.0, 0)

    def judge(self, loss: Tensor, skipped: Tensor) -> Tensor:
        """Returns 1.0 (0-d) if the update is skipped or the loss is a spike, else 0.0.

        If it returns 0.0, the loss joins the mean.
        skipped: 0-d, 1.0 if the update is skipped for another reason, else 0.0.
        """
        loss = loss.double()
        skipped = torch.maximum(
            skipped, ((self._count >= SETTLED) & (loss > self.ratio * self.mean)).float()
        )
        count = (self._count + 1).clamp(max=WINDOW)
        moved = self.mean + (loss - self.mean) / count
        self.mean.copy_(torch.where(skipped.bool(), self.mean, moved))
        self._count.copy_(torch.where(skipped.bool(), self._count, count))
        return skipped

    def state(self) -> MeanLossState:
        """Returns the state that `restore` takes. Waits for the device."""
        return MeanLossState(mean=self.mean.item(), count=int(self._count))

    def restore(self, state: MeanLossState | None) -> None:
        """Continues from a state; None changes nothing."""
        if state is not None:
            self._set(state.mean, state.count)

    def _set(self, mean: float, count: int) -> None:
        self.mean = torch.full((), mean, dtype=torch.float64, device=self._device)
        self._count = torch.full((), count, device=self._device)
