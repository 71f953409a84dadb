"""The learning rate as a pure function of the samples consumed, with Megatron's five decay styles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.training import LrScheduleConfig


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """Warm-up from `warmup_init` to `max_lr`, then decay to `min_lr`. All lengths are in samples.

    An iteration uses the samples consumed before it, so the first one runs at `warmup_init` (0 by default), as in Megatron.
    """

    max_lr: float
    min_lr: float
    style: str
    warmup_init: float
    warmup_samples: float
    decay_samples: float
    wsd_style: str
    wsd_samples: float

    @classmethod
    def build(cls, config: LrScheduleConfig, *, train_samples: int, batches: BatchSchedule) -> LrSchedule:
        """The schedule of a run of `train_samples` samples, over which it decays unless told otherwise.

        A length in iterations is that of the run's first ones; WSD's decay, at the end, is of iterations with the full batch.
        ValueError without `--lr`, or where the warm-up is longer than the decay.
        """
        if config.lr is None:
            raise ValueError("--lr is not set: training needs a learning rate")
        decay = config.lr_decay_samples or batches.consumed_after(config.lr_decay_iters or 0) or train_samples
        warmup: float = config.lr_warmup_samples or batches.consumed_after(config.lr_warmup_iters)
        if config.lr_warmup_fraction is not None:
            warmup = config.lr_warmup_fraction * decay
        if warmup and warmup >= decay > 0:
            raise ValueError(f"the warm-up ({warmup:g} samples) must be shorter than the decay ({decay} samples): lower "
                             "--lr-warmup-iters or raise --lr-decay-iters")
        wsd = config.lr_wsd_decay_samples or (config.lr_wsd_decay_iters or 0) * batches.full
        if wsd > decay - warmup:
            raise ValueError(f"--lr-wsd-decay-iters ({wsd} samples) is longer than what follows the warm-up "
                             f"({decay - warmup:g} samples)")
        return cls(max_lr=config.lr, min_lr=config.min_lr, style=config.lr_decay_style, warmup_init=config.lr_warmup_init,
                   warmup_samples=warmup, decay_samples=decay, wsd_style=config.lr_wsd_decay_style, wsd_samples=wsd)

    def at(self, consumed_samples: int) -> float:
        """The learning rate of the iteration that starts after `consumed_samples`."""
        if self.warmup_samples and consumed_samples <= self.warmup_samples:
            return self.warmup_init + (self.max_lr - self.warmup_init) * consumed_samples / self.warmup_samples
        if self.style == "constant":
            return self.max_lr
        if consumed_samples > self.decay_samples:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup_samples, 1) / max(consumed_samples, 1)))
        return self.min_lr + self._remaining(consumed_samples) * (self.max_lr - self.min_lr)

    def _remaining(self, consumed_samples: int) -> float:
        """The share of (max_lr - min_lr) that is left, 1 -> 0."""
        if self.style == "WSD":
            stable_until = self.decay_samples - self.wsd_samples
            if consumed_samples <= stable_until:
                return 1.0
            return _decay(self.wsd_style, (consumed_samples - stable_until) / self.wsd_samples)
        return _decay(self.style, (consumed_samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples))


def _decay(style: str, progress: float) -> float:
    if style == "linear":
        return 1.0 - progress
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * progress) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**progress - 1.0
    assert style == "minus_sqrt", style
    return 1.0 - math.sqrt(progress)
