"""The loss scale of a float16 run: constant, or dynamic by Megatron's rule.

    a step with a gradient that is not finite   the count of good steps starts again at 0; from the
                                                `hysteresis`-th such step on: scale / 2
    `window` good steps in a row                scale x 2, and the count of bad steps starts again

Everything is a 0-d tensor on the device and nothing waits for it. Every rank decides alike, from
the same global gradient norm.

Updates are also skipped where the loss is a spike (`SpikeGuard`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config.optimizer_settings import LossScaleConfig

BACKOFF_FACTOR, GROWTH_FACTOR = 0.5, 2.0
MOST_STEPS = 2**62


@dataclass(frozen=True, kw_only=True)
class LossScaleState:
    """The state of a dynamic scale in a checkpoint.

    good_steps: the steps since the last overflow or growth.
    patience: the overflows left before the scale is halved. It is 0 or less after a halving, until
        the scale grows.
    """

    scale: float
    good_steps: int
    patience: int

    def __post_init__(self) -> None:
        if not 0.0 < self.scale <= torch.finfo(torch.float32).max:
            raise ValueError(
                f"loss_scale.scale must be above 0 and within float32 (got {self.scale})"
            )
        if not 0 <= self.good_steps <= MOST_STEPS or abs(self.patience) > MOST_STEPS:
            raise ValueError(
                f"loss_scale.good_steps must be in [0, {MOST_STEPS}] and patience within it (got "
                f"{self.good_steps} and {self.patience})"
            )


class LossScale:
    """The loss scale of a run.

    scale: the scale of the current step. `update` writes into the tensor, which a CUDA graph reads.
    """

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        self._config = config
        self.is_dynamic = config.loss_scale is None
        first, least = config.initial_loss_scale, config.min_loss_scale
        if config.loss_scale is not None:
            first = least = config.loss_scale
        self.scale = torch.full((), first, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._patience = torch.full_like(self._good_steps, config.hysteresis)
        self.minimum = torch.tensor(least).item()  # rounded to float32

    def inverse(self) -> Tensor:
        """Returns 1 / scale, in float32 like Megatron's."""
        return self.scale.double().reciprocal().float()

    def update(self, overflowed: Tensor) -> None:
        """Ends a step. A constant scale stays as it is.

        overflowed: 0-d, 1.0 if the step's gradients were not finite, else 0.0.
        """
        if not self.is_dynamic:
            return
        bad = overflowed.bool()
        patience = self._patience - bad.long()
        good_steps = (self._good_steps + 1).masked_fill(bad, 0)
        # `>=`, since a run resumed with a shorter window may start beyond it.
        grows = good_steps >= int(self._config.loss_scale_window)
        # Both outcomes are computed and chosen on the device. A bad step has no good steps behind
        # it, so it never grows.
        lowered = (self.scale * BACKOFF_FACTOR).clamp(min=self.minimum)
        grown = torch.where(grows, self.scale * GROWTH_FACTOR, self.scale)
        self.scale.copy_(torch.where(bad & (patience <= 0), lowered, grown))
        self._good_steps.copy_(good_steps.masked_fill(grows, 0))
        self._patience.copy_(patience.masked_fill(grows, self._config.hysteresis))

    def state(self) -> LossScaleState | None:
        """Returns the state for `restore`; None for a constant scale. Waits for the device."""
        if not self.is_dynamic:
            return None
        return LossScaleState(
            scale=self.scale.item(), good_steps=int(self._good_steps), patience=int(self._patience)
        )

    def restore(self, state: LossScaleState | None) -> None:
        """Continues from a state. Does nothing if the scale is constant or the state is None."""
        if self.is_dynamic and state is not None:
            self.scale.fill_(state.scale)
            self._good_steps.fill_(state.good_steps)
            self._patience.fill_(state.patience)


# The running mean of the loss, and the spikes above it: `--skip-update-on-spike K`.
#
#     each update       mean += (loss - mean) / min(updates so far, 100)
#                       It is the plain mean of the first 100 losses, then decays exponentially.
#     loss > K x mean   a spike, from 20 losses in the mean on: the step changes no weight
#
# The loss of a skipped update does not move the mean, whatever the reason for the skip. A spike
# does not lower the loss scale of a float16 run. Everything is a 0-d tensor on the device and
# nothing waits for it. Every rank decides alike, from the same loss.


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

    def __init__(self, ratio: float, device: torch.device) -> None:
        self.ratio = ratio
        self.mean = torch.zeros((), dtype=torch.float64, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

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
            self.mean.fill_(state.mean)
            self._count.fill_(state.count)
