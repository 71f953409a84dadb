"""The settings of the learning rate, as one frozen class."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.checks import require_at_least, require_one_of, require_within

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


@dataclass(frozen=True, kw_only=True)
class LrScheduleConfig:
    """The learning rate over the run.

    Lengths count samples if `--train-samples` gives the length of the run, else iterations. This
    is Megatron's rule.
    """

    lr: float | None = None
    min_lr: float = 0.0
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int = 0
    lr_warmup_samples: int = 0
    lr_warmup_fraction: float | None = None
    lr_warmup_init: float = 0.0
    lr_wsd_decay_style: str = "exponential"
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_samples: int | None = None

    def __post_init__(self) -> None:
        require_one_of(self, "lr_decay_style", LR_DECAY_STYLES)
        require_one_of(self, "lr_wsd_decay_style", WSD_DECAY_STYLES)
        require_at_least(
            self, 0.0, "lr", "min_lr", "lr_warmup_init", "lr_warmup_iters", "lr_warmup_samples"
        )
        require_at_least(
            self,
            1,
            "lr_decay_iters",
            "lr_decay_samples",
            "lr_wsd_decay_iters",
            "lr_wsd_decay_samples",
        )
        require_within(self, 0.0, 1.0, "lr_warmup_fraction")
        if self.lr is not None and self.min_lr > self.lr:
            raise ValueError(f"--min-lr {self.min_lr} is above --lr {self.lr}")
        if self.lr is not None and self.lr_warmup_init > self.lr:
            raise ValueError(f"--lr-warmup-init {self.lr_warmup_init} is above --lr {self.lr}")
        if self.lr_warmup_fraction is not None and (self.lr_warmup_iters or self.lr_warmup_samples):
            raise ValueError(
                "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples: set one"
            )
        if (
            self.lr_decay_style == "WSD"
            and self.lr_wsd_decay_iters is None
            and self.lr_wsd_decay_samples is None
        ):
            raise ValueError(
                "--lr-decay-style WSD needs --lr-wsd-decay-iters (or --lr-wsd-decay-samples)"
            )
        if self.lr_decay_style != "WSD" and (self.lr_wsd_decay_iters or self.lr_wsd_decay_samples):
            raise ValueError(
                f"--lr-wsd-decay-iters needs --lr-decay-style WSD (got {self.lr_decay_style})"
            )
