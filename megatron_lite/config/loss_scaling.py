"""The settings of loss scaling, which keeps small gradients of a float16 run from vanishing."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_lite.config.setting import check_settings, setting


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

    loss_scale: float | None = setting(
        "a constant loss scale; else a dynamic one: halved after an overflow, which skips "
        "its step, and doubled after a window without",
        above=0,
    )
    initial_loss_scale: float = setting("first dynamic scale", 2.0**32, above=0)
    min_loss_scale: float = setting(
        "smallest dynamic scale: an overflow at it stops the run, unless "
        "--no-check-for-nan-in-loss-and-grad",
        1.0,
        above=0,
    )
    loss_scale_window: float = setting(
        "steps without overflow after which the scale doubles", 1000.0, least=1
    )
    hysteresis: int = setting(
        "overflows before the scale is halved for the first time, or after it has doubled",
        2,
        least=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)
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
