"""The settings of the learning rate, as one frozen class."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.setting import check_settings, setting, switch

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

    lr: float | None = setting("largest learning rate (needed to train)", least=0.0)
    min_lr: float = setting("smallest learning rate, at the end of the decay", 0.0, least=0.0)
    lr_decay_style: str = setting("shape of the decay", "linear", choices=LR_DECAY_STYLES)
    lr_decay_iters: int | None = setting(
        "iterations until --min-lr; derived: the whole run", least=1
    )
    lr_decay_samples: int | None = setting("the same in samples, with --train-samples", least=1)
    lr_warmup_iters: int = setting("iterations of linear warm-up", 0, least=0.0)
    lr_warmup_samples: int = setting("the same in samples, with --train-samples", 0, least=0.0)
    lr_warmup_fraction: float | None = setting(
        "warm-up as a share of the decay's length", least=0.0, below=1.0
    )
    lr_warmup_init: float = setting("learning rate at the start of the warm-up", 0.0, least=0.0)
    lr_wsd_decay_style: str = setting(
        "how WSD (warm-up, stable, decay) falls at its end", "exponential", choices=WSD_DECAY_STYLES
    )
    lr_wsd_decay_iters: int | None = setting("iterations of WSD's decay, at the end", least=1)
    lr_wsd_decay_samples: int | None = setting("the same in samples, with --train-samples", least=1)
    decoupled_lr: float | None = setting(
        "--lr of the word embedding and the output layer, if it differs", least=0.0
    )
    decoupled_min_lr: float | None = setting("their --min-lr; derived: --min-lr", least=0.0)
    use_checkpoint_opt_param_scheduler: bool = switch(
        "a run that continues takes learning-rate schedule and weight decay from its checkpoint",
        alias="--use-checkpoint-opt-param-scheduler",
        name="--use-checkpoint-opt_param-scheduler",
    )
    override_opt_param_scheduler: bool = switch(
        "a run that continues takes them from the flags, which is the default, and the log does "
        "not list the differences",
        alias="--override-opt-param-scheduler",
        name="--override-opt_param-scheduler",
    )

    def __post_init__(self) -> None:
        check_settings(self)
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
