"""The loss scale of a float16 run: constant, or dynamic by Megatron's rule.

    a step with a gradient that is not finite   the count of good steps starts again at 0; from the
                                                `hysteresis`-th such step on: scale / 2
    `window` good steps in a row                scale x 2, and the count of bad steps starts again

Everything is a 0-d tensor on the device and nothing waits for it. Every rank decides alike, from
the same global gradient norm.
"""

from __future__ import annotations

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

    scale: Tensor
    _good_steps: Tensor
    _patience: Tensor

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self.is_dynamic = config.loss_scale is None
        self._set(
            config.initial_loss_scale if config.loss_scale is None else config.loss_scale,
            0,
            config.hysteresis,
        )
        least = config.min_loss_scale if config.loss_scale is None else config.loss_scale
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
            self._set(state.scale, state.good_steps, state.patience)

    def _set(self, scale: float, good_steps: int, patience: int) -> None:
        self.scale = torch.full((), scale, dtype=torch.float32, device=self._device)
        self._good_steps, self._patience = (
            torch.full((), number, device=self._device) for number in (good_steps, patience)
        )
