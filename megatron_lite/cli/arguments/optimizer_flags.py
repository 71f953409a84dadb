"""The flags of OptimizerConfig, LossScaleConfig and LrScheduleConfig."""

from __future__ import annotations

import argparse

from megatron_lite.cli.arguments.flag_group import FlagGroup
from megatron_lite.config.loss_scaling import LossScaleConfig
from megatron_lite.config.lr_schedule_settings import (
    LR_DECAY_STYLES,
    WSD_DECAY_STYLES,
    LrScheduleConfig,
)
from megatron_lite.config.optimizer_settings import (
    MUON_COEFFICIENT_TYPES,
    MUON_MATMUL_PRECISIONS,
    MUON_SCALE_MODES,
    MUON_TP_MODES,
    OPTIMIZER_IMPLS,
    OPTIMIZERS,
    OptimizerConfig,
)


def add_optimizer_flags(parser: argparse.ArgumentParser) -> None:
    group = FlagGroup(parser, "optimizer", OptimizerConfig)
    group.value(
        "--optimizer",
        str,
        "adam is AdamW; muon orthogonalizes the updates of layers' matrices, with AdamW for all "
        "other weights (docs/optimizers.md)",
        values=tuple(OPTIMIZERS),
    )
    group.value(
        "--optimizer-impl",
        str,
        "whose kernel computes AdamW: torch's, or NVIDIA apex's FusedAdam on CUDA (docs/apex.md)",
        values=OPTIMIZER_IMPLS,
    )
    group.value("--adam-beta1", float, "decay of the gradient's mean")
    group.value("--adam-beta2", float, "decay of the squared gradient's mean")
    group.value("--adam-eps", float, "added to the denominator")
    group.value("--weight-decay", float, "decoupled weight decay of matrices")
    group.value("--clip-grad", float, "largest global gradient norm; 0 for no clipping")
    group.value("--muon-momentum", float, "decay of the gradient's mean, which Muon orthogonalizes")
    group.switch(
        "--muon-nesterov", "orthogonalize the mean as it would be after the same gradient once more"
    )
    group.value("--muon-num-ns-steps", int, "Newton-Schulz iterations")
    group.value(
        "--muon-scale-mode",
        str,
        "by what the orthogonal matrix of m rows and n columns is multiplied: "
        "sqrt(max(m, n)), sqrt(m / n) or sqrt(max(1, m / n))",
        values=MUON_SCALE_MODES,
    )
    group.value(
        "--muon-extra-scale-factor",
        float,
        "a further factor; with spectral, 0.2 gives updates the size of AdamW's",
    )
    group.value(
        "--muon-coefficient-type",
        str,
        "polynomials of the Newton-Schulz iterations",
        values=MUON_COEFFICIENT_TYPES,
    )
    group.off_switch(
        "--muon-no-split-qkv",
        "muon_split_qkv",
        "orthogonalize linear_qkv as one matrix, not as three",
    )
    group.value(
        "--muon-tp-mode",
        str,
        "a matrix that is split over tensor-parallel ranks is gathered and orthogonalized on "
        "each of them, or each orthogonalizes its own block",
        values=MUON_TP_MODES,
    )
    group.value(
        "--muon-fp32-matmul-prec",
        str,
        "Newton-Schulz in bfloat16 (medium) or in float32 (high)",
        values=MUON_MATMUL_PRECISIONS,
    )


def add_loss_scaling_flags(parser: argparse.ArgumentParser) -> None:
    group = FlagGroup(parser, "loss scaling of --fp16", LossScaleConfig)
    group.value(
        "--loss-scale",
        float,
        "a constant loss scale; else a dynamic one: halved after an overflow, which skips "
        "its step, and doubled after a window without",
    )
    group.value("--initial-loss-scale", float, "first dynamic scale")
    group.value(
        "--min-loss-scale",
        float,
        "smallest dynamic scale: an overflow at it stops the run, unless "
        "--no-check-for-nan-in-loss-and-grad",
    )
    group.value(
        "--loss-scale-window", float, "steps without overflow after which the scale doubles"
    )
    group.value(
        "--hysteresis",
        int,
        "overflows before the scale is halved for the first time, or after it has doubled",
    )


def add_lr_schedule_flags(parser: argparse.ArgumentParser) -> None:
    group = FlagGroup(parser, "learning rate", LrScheduleConfig)
    group.value("--lr", float, "largest learning rate (needed to train)")
    group.value("--min-lr", float, "smallest learning rate, at the end of the decay")
    group.value("--lr-decay-style", str, "shape of the decay", values=LR_DECAY_STYLES)
    group.value("--lr-decay-iters", int, "iterations until --min-lr; derived: the whole run")
    group.value("--lr-decay-samples", int, "the same in samples, with --train-samples")
    group.value("--lr-warmup-iters", int, "iterations of linear warm-up")
    group.value("--lr-warmup-samples", int, "the same in samples, with --train-samples")
    group.value("--lr-warmup-fraction", float, "warm-up as a share of the decay's length")
    group.value("--lr-warmup-init", float, "learning rate at the start of the warm-up")
    group.value(
        "--lr-wsd-decay-style",
        str,
        "how WSD (warm-up, stable, decay) falls at its end",
        values=WSD_DECAY_STYLES,
    )
    group.value("--lr-wsd-decay-iters", int, "iterations of WSD's decay, at the end")
    group.value("--lr-wsd-decay-samples", int, "the same in samples, with --train-samples")
    group.value(
        "--decoupled-lr", float, "--lr of the word embedding and the output layer, if it differs"
    )
    group.value("--decoupled-min-lr", float, "their --min-lr; derived: --min-lr")
    group.switch(
        "--use-checkpoint-opt_param-scheduler",
        "a run that continues takes learning-rate schedule and weight decay from its checkpoint",
        alias="--use-checkpoint-opt-param-scheduler",
    )
    group.switch(
        "--override-opt_param-scheduler",
        "a run that continues takes them from the flags, which is the default, and the log does "
        "not list the differences",
        alias="--override-opt-param-scheduler",
    )
