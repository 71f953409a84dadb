"""The loss scale of a float16 run: constant, or dynamic by Megatron's rule.

    step with a gradient that is not finite     the good steps start again; once `hysteresis` such steps have come: scale / 2
    `window` good steps in a row                scale x 2, and the hysteresis starts again

Everything is a 0-d tensor on the device and nothing waits for it. Every rank decides alike, from the same global gradient norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config.loss_scale import LossScaleConfig

BACKOFF_FACTOR, GROWTH_FACTOR = 0.5, 2.0


def scale_backward(loss: Tensor, scale: Tensor | None) -> Tensor:
    """`loss`, whose backward gives the gradients of loss x scale. Of the product nothing would be gained but a tensor to keep."""
    if scale is not None:
        loss.register_hook(scale.mul)
    return loss


@dataclass(frozen=True, kw_only=True)
class LossScaleState:
    """What a checkpoint keeps of a dynamic scale. good_steps: since the last overflow or growth. patience: overflows left before
    the scale is halved; not above 0 once it has been."""

    scale: float
    good_steps: int
    patience: int

    @classmethod
    def from_plain(cls, values: Mapping[str, float] | None) -> LossScaleState | None:
        """Reads a JSON object. ValueError on numbers that no run has."""
        if values is None:
            return None
        state = cls(scale=float(values["scale"]), good_steps=int(values["good_steps"]), patience=int(values["patience"]))
        if not 0.0 < state.scale < math.inf or state.good_steps < 0:
            raise ValueError(f"{state} is no state of a loss scale")
        return state


class LossScale:
    """`scale` is the one of the step under way; `update` replaces it and never writes into it."""

    scale: Tensor
    _good_steps: Tensor
    _patience: Tensor

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self.is_dynamic = config.loss_scale is None
        self._set(config.initial_loss_scale if config.loss_scale is None else config.loss_scale, 0, config.hysteresis)
        self.minimum = torch.tensor(config.min_loss_scale).item() if self.is_dynamic else self.scale.item()  # in float32

    def inverse(self) -> Tensor:
        """1 / scale, float32 as Megatron's."""
        return self.scale.double().reciprocal().float()

    def update(self, overflowed: Tensor) -> None:
        """Ends a step. overflowed: 0-d, 1.0 where its gradients were not finite, else 0.0. Does nothing to a constant scale."""
        if not self.is_dynamic:
            return
        bad = overflowed.bool()
        patience = self._patience - bad.long()
        good_steps = (self._good_steps + 1).masked_fill(bad, 0)
        grows = good_steps >= int(self._config.loss_scale_window)  # past it only where a resumed run has another window
        lowered = (self.scale * BACKOFF_FACTOR).clamp(min=self.minimum)
        self.scale = torch.where(bad & (patience <= 0), lowered, torch.where(grows, self.scale * GROWTH_FACTOR, self.scale))
        self._good_steps = good_steps.masked_fill(grows, 0)
        self._patience = patience.masked_fill(grows, self._config.hysteresis)

    def state(self) -> LossScaleState | None:
        """What `restore` takes; None of a constant scale. Reads the device."""
        if not self.is_dynamic:
            return None
        return LossScaleState(scale=self.scale.item(), good_steps=int(self._good_steps), patience=int(self._patience))

    def restore(self, state: LossScaleState | None) -> None:
        """Goes on from there, unless the scale is constant or there is no state."""
        if self.is_dynamic and state is not None:
            self._set(state.scale, state.good_steps, state.patience)

    def _set(self, scale: float, good_steps: int, patience: int) -> None:
        self.scale = torch.tensor(scale, dtype=torch.float32, device=self._device)
        self._good_steps, self._patience = (torch.tensor(number, device=self._device) for number in (good_steps, patience))
