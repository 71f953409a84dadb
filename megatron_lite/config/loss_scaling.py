"""The settings of loss scaling, which keeps small gradients of a float16 run from vanishing."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from megatron_lite.config.checks import flag, require_at_least


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """The factor by which the loss of a float16 run is multiplied before backward.

    loss_scale: a constant scale. None: the scale is dynamic and follows the other fields
        (optim/loss_scale.py).
    initial_loss_scale, min_loss_scale: the first dynamic scale, and the smallest.
    loss_scale_window: the number of steps without overflow after which the scale doubles.
    hysteresis: the number of overflows before the scale is halved for the first time, or for the
        first time after it has doubled.
    """

    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000.0
    hysteresis: int = 2

    def __post_init__(self) -> None:
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ValueError(f"{flag(name)} must be above 0 and finite (got {value})")
        require_at_least(self, 1, "loss_scale_window", "hysteresis")
        if self.loss_scale_window % 1:
            raise ValueError(
                "--loss-scale-window counts steps: give a whole number (got "
                f"{self.loss_scale_window})"
            )
        if self.min_loss_scale > self.initial_loss_scale:
            raise ValueError(
                f"--min-loss-scale {self.min_loss_scale} is above --initial-loss-scale "
                f"{self.initial_loss_scale}"
            )

    def changed(self) -> list[str]:
        """Returns the names of the fields that do not have their default values."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]
