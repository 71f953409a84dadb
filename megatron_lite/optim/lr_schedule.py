"""The learning rate as a pure function of the samples consumed, with Megatron's five decay
styles."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.optimizer_settings import (
    LR_DECAY_STYLES,
    WSD_DECAY_STYLES,
    LrScheduleConfig,
)


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """A warm-up from `warmup_init` to `max_lr`, and a decay to `min_lr`. Lengths are in samples.

    skipped_samples: the consumed samples that do not count, as in Megatron. They are those of a
        float16 run's skipped updates, and those before a start without the optimizer's states.

    An iteration uses the samples consumed before it, so the first one runs at `warmup_init` (0 by
    default), as in Megatron.

    decoupled_max_lr, decoupled_min_lr: the same two rates of the word embedding and the output
        layer. None: they have no rates of their own.
    """

    max_lr: float
    min_lr: float
    style: str
    warmup_init: float
    warmup_samples: float
    decay_samples: float
    wsd_style: str
    wsd_samples: float
    decoupled_max_lr: float | None = None
    decoupled_min_lr: float | None = None
    skipped_samples: int = 0

    @classmethod
    def build(
        cls, config: LrScheduleConfig, *, train_samples: int, batches: BatchSchedule
    ) -> LrSchedule:
        """Returns the schedule of a run of `train_samples` samples.

        The decay takes the whole run unless the flags set its length. A length in iterations counts
        the run's first iterations. The WSD decay comes last, so its iterations have the full batch.
        ValueError: `--lr` is missing, the warm-up is not shorter than the decay, or the WSD decay
            is longer than the time after the warm-up.
        """
        if config.lr is None:
            raise ValueError("--lr is not set: training needs a learning rate")
        decay = (
            config.lr_decay_samples
            or batches.consumed_after(config.lr_decay_iters or 0)
            or train_samples
        )
        warmup: float = config.lr_warmup_samples or batches.consumed_after(config.lr_warmup_iters)
        if config.lr_warmup_fraction is not None:
            warmup = config.lr_warmup_fraction * decay
        wsd = config.lr_wsd_decay_samples or (config.lr_wsd_decay_iters or 0) * batches.full
        return cls(
            max_lr=config.lr,
            min_lr=config.min_lr,
            style=config.lr_decay_style,
            warmup_init=config.lr_warmup_init,
            warmup_samples=warmup,
            decay_samples=decay,
            wsd_style=config.lr_wsd_decay_style,
            wsd_samples=wsd,
            decoupled_max_lr=config.decoupled_lr,
            decoupled_min_lr=None
            if config.decoupled_lr is None
            else config.min_lr
            if config.decoupled_min_lr is None
            else config.decoupled_min_lr,
        )

    def __post_init__(self) -> None:
        styles = {"style": LR_DECAY_STYLES, "wsd_style": WSD_DECAY_STYLES}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in styles:
                if value not in styles[field.name]:
                    known = ", ".join(styles[field.name])
                    raise ValueError(
                        f"schedule.{field.name} must be one of {known} (got {value!r})"
                    )
            elif value is not None and not 0.0 <= value < math.inf:
                raise ValueError(
                    f"schedule.{field.name} must be at least 0 and finite (got {value})"
                )
        if self.warmup_samples and self.warmup_samples >= self.decay_samples > 0:
            raise ValueError(
                f"the warm-up ({self.warmup_samples:g} samples) must be shorter than the decay "
                f"({self.decay_samples:g} samples): lower --lr-warmup-iters or raise "
                "--lr-decay-iters"
            )
        left = self.decay_samples - self.warmup_samples
        if self.style == "WSD" and self.wsd_samples > left:
            raise ValueError(
                f"--lr-wsd-decay-iters ({self.wsd_samples:g} samples) is longer than what follows "
                f"the warm-up ({left:g} samples)"
            )

    def taken_from(self, saved: LrSchedule) -> LrSchedule:
        """Returns the schedule of a run that continues with the schedule of its checkpoint.

        As in Megatron, this schedule keeps its `warmup_init` and its WSD decay, and takes all else
        from `saved`. A schedule without a WSD decay takes that, too.
        ValueError: the WSD decay is longer than the time after the warm-up.
        """
        taken = replace(saved, warmup_init=min(self.warmup_init, saved.max_lr))
        if self.wsd_samples:
            taken = replace(taken, wsd_style=self.wsd_style, wsd_samples=self.wsd_samples)
        return taken

    def changed_from(self, saved: LrSchedule) -> list[str]:
        """Returns each value that differs, such as "max_lr 0.1 -> 0.2"."""
        return [
            f"{field.name} {_shown(theirs)} -> {_shown(mine)}"
            for field in fields(self)
            if (theirs := getattr(saved, field.name)) != (mine := getattr(self, field.name))
        ]

    def decoupled_at(self, consumed_samples: int) -> float | None:
        """Returns the learning rate of the word embedding and the output layer.

        Returns None if it is the same as that of all other weights.
        """
        if self.decoupled_max_lr is None or self.decoupled_min_lr is None:
            return None
        return replace(self, max_lr=self.decoupled_max_lr, min_lr=self.decoupled_min_lr).at(
            consumed_samples
        )

    def at(self, consumed_samples: int) -> float:
        """Returns the learning rate of the iteration that starts after `consumed_samples`."""
        consumed_samples -= self.skipped_samples
        # `<=` as in Megatron: the iteration that starts at the end of the warm-up is part of it.
        if self.warmup_samples and consumed_samples <= self.warmup_samples:
            return (
                self.warmup_init
                + (self.max_lr - self.warmup_init) * consumed_samples / self.warmup_samples
            )
        if self.style == "constant":
            return self.max_lr
        if consumed_samples > self.decay_samples:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(
                self.min_lr,
                self.max_lr * math.sqrt(max(self.warmup_samples, 1) / max(consumed_samples, 1)),
            )
        # The share of (max_lr - min_lr) that is left goes from 1 to 0.
        start = self.warmup_samples
        length, style = self.decay_samples - start, self.style
        if style == "WSD":
            start, length = self.decay_samples - self.wsd_samples, self.wsd_samples
            style = self.wsd_style
        progress = max(consumed_samples - start, 0.0) / length if length else 0.0
        return self.min_lr + DECAYS[style](progress) * (self.max_lr - self.min_lr)


def _shown(value: object) -> str:
    """Returns a value for a message. 4.800000000000001 samples of a warm-up are shown as 4.8."""
    return f"{value:.15g}" if isinstance(value, float) else str(value)


DECAYS = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1.0),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
