"""The running mean of the loss, and which losses are spikes beside it: `--skip-update-on-spike K`.

    update made       mean += (loss - mean) / min(updates so far, 100)      the plain mean of the first 100, then one that forgets
    loss > K x mean   a spike, once the mean is that of 20 losses: no weight is changed

The loss of an update that was skipped, for whatever reason, does not move the mean, nor does a spike lower the loss scale of a
float16 run. Everything is a 0-d tensor on the device and nothing waits for it. Every rank decides alike, from the same loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

WINDOW = 100  # losses that the mean remembers
SETTLED = 20  # losses from which on it is compared with


@dataclass(frozen=True, kw_only=True)
class MeanLossState:
    """What a checkpoint keeps: the mean, and of how many losses it is (at most WINDOW are told apart)."""

    mean: float
    count: int

    @classmethod
    def from_plain(cls, values: Mapping[str, float] | None) -> MeanLossState | None:
        """Reads a JSON object. ValueError on numbers that no run has."""
        if values is None:
            return None
        state = cls(mean=float(values["mean"]), count=int(values["count"]))
        if not math.isfinite(state.mean) or not 0 <= state.count <= WINDOW:
            raise ValueError(f"{state} is no running mean of a loss")
        return state


class SpikeGuard:
    """ratio: how far above the mean a loss is a spike. mean: 0-d float64, replaced by each update and never written into."""

    mean: Tensor
    _count: Tensor

    def __init__(self, ratio: float, device: torch.device) -> None:
        self.ratio, self._device = ratio, device
        self._set(0.0, 0)

    def judge(self, loss: Tensor, skipped: Tensor) -> Tensor:
        """`skipped` (0-d, 1.0 where the update is skipped anyway, else 0.0) or 1.0 where the loss is a spike. Else it joins the
        mean."""
        loss = loss.double()
        skipped = torch.maximum(skipped, ((self._count >= SETTLED) & (loss > self.ratio * self.mean)).float())
        count = (self._count + 1).clamp(max=WINDOW)
        moved = self.mean + (loss - self.mean) / count
        self.mean = torch.where(skipped.bool(), self.mean, moved)
        self._count = torch.where(skipped.bool(), self._count, count)
        return skipped

    def state(self) -> MeanLossState:
        """What `restore` takes. Reads the device."""
        return MeanLossState(mean=self.mean.item(), count=int(self._count))

    def restore(self, state: MeanLossState | None) -> None:
        """Goes on from there, if there is a state."""
        if state is not None:
            self._set(state.mean, state.count)

    def _set(self, mean: float, count: int) -> None:
        self.mean = torch.tensor(mean, dtype=torch.float64, device=self._device)
        self._count = torch.tensor(count, device=self._device)
