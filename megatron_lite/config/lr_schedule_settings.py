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

    decoupled_lr, decoupled_min_lr: the largest and the smallest learning rate of the word embedding
        and the output layer. None: the same as lr and min_lr.
    use_checkpoint_opt_param_scheduler: whether a run that continues takes the learning-rate
        schedule and the weight decay of its checkpoint instead of the flags.
    override_opt_param_scheduler: whether the log is silent about a schedule that differs from the
        checkpoint's. The flags decide in either case.
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
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    use_checkpoint_opt_param_scheduler: bool = False
    override_opt_param_scheduler: bool = False

    def __post_init__(self) -> None:
        require_one_of(self, "lr_decay_style", LR_DECAY_STYLES)
        require_one_of(self, "lr_wsd_decay_style", WSD_DECAY_STYLES)
        require_at_least(
            self, 0.0, "lr", "min_lr", "lr_warmup_init", "lr_warmup_iters", "lr_warmup_samples"
        )
        require_at_least(self, 0.0, "decoupled_lr", "decoupled_min_lr")
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
        if self.decoupled_lr is not None and (self.decoupled_min_lr or 0.0) > self.decoupled_lr:
            raise ValueError(
                f"--decoupled-min-lr {self.decoupled_min_lr} is above --decoupled-lr "
                f"{self.decoupled_lr}"
            )
        if self.use_checkpoint_opt_param_scheduler and self.override_opt_param_scheduler:
            raise ValueError(
                "--use-checkpoint-opt_param-scheduler takes the checkpoint's schedule, and "
                "--override-opt_param-scheduler that of the flags: set one"
            )
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
