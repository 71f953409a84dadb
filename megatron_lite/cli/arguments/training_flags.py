"""The flags of TrainingConfig."""

from __future__ import annotations

import argparse

from megatron_lite.cli.arguments.flag_group import FlagGroup
from megatron_lite.config.training import EXIT_SIGNALS, TrainingConfig


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    group = FlagGroup(parser, "training", TrainingConfig)
    group.value("--micro-batch-size", int, "samples of one forward pass on one rank")
    group.value(
        "--global-batch-size",
        int,
        "samples of one iteration over all ranks; derived: one micro-batch per replica",
    )
    group.value(
        "--rampup-batch-size",
        int,
        "START INCREMENT SAMPLES: a batch that grows from START to --global-batch-size by "
        "INCREMENT at a time, while SAMPLES are consumed",
        nargs=3,
    )
    group.value(
        "--step-batch-size-schedule",
        str,
        "TOKENS:SAMPLES ..: the batch size from each number of consumed tokens on, such as "
        "'0:768 250B:1536'; the last one is --global-batch-size",
    )
    group.value("--train-iters", int, "length of the run in iterations; or --train-samples")
    group.value("--train-samples", int, "length of the run in samples")
    group.value("--seed", int, "seed of initial weights, data order and dropout")
    group.switch(
        "--bf16",
        "weights and activations in bfloat16, master weights in float32; --model assumes it",
    )
    group.switch("--no-bf16", "train a --model in float32")
    group.switch(
        "--fp16",
        "weights and activations in float16, master weights in float32, and the loss scaled",
    )
    group.off_switch(
        "--no-gradient-accumulation-fusion",
        "gradient_accumulation_fusion",
        "let autograd add up the gradients of linear weights, not NVIDIA apex's kernel or the "
        "backward of the layers (docs/apex.md)",
    )
    group.value(
        "--memory-limit",
        str,
        "stop with advice if a rank allocates more than this, such as 4GiB, as if its device had "
        "no more",
    )
    group.switch(
        "--allow-predicted-out-of-memory",
        "start a run also if the predicted peak of a step exceeds the memory of the machine",
    )
    group.value(
        "--loss-chunk-size",
        int,
        "tokens of a micro-batch that have logits at a time; 0: all of them, and their logits are "
        "kept. In float32 forward computes the gradients too, and the default is 512. In 16 bits "
        "and under FSDP2 backward computes the logits again, and the default is 0. In 16 bits the "
        "gradient of the output weight is then a sum of rounded parts",
    )
    group.switch(
        "--calculate-per-token-loss",
        "give each token that counts the same weight in the gradients, not each micro-batch; only "
        "--eod-mask-loss makes a difference between them",
    )
    group.value(
        "--eval-interval",
        int,
        "iterations between validations; the end of the run has one in any case",
    )
    group.value("--eval-iters", int, "global batches of one validation; 0 for none at all")
    group.value("--exit-interval", int, "save and stop when the iteration is a multiple of it")
    group.value(
        "--exit-duration-in-mins",
        int,
        "save and stop after the iteration that ends later than this",
    )
    group.switch(
        "--exit-signal-handler",
        "save and stop after the iteration or the batch of an evaluation in which any rank gets "
        "SIGTERM, SIGUSR1, SIGUSR2 or --exit-signal",
    )
    group.value(
        "--exit-signal",
        str,
        "another signal that --exit-signal-handler waits for",
        values=EXIT_SIGNALS,
    )
    group.off_switch(
        "--no-check-for-nan-in-loss-and-grad", "check_for_nan_in_loss_and_grad", "go on after a NaN"
    )
    group.value(
        "--max-skipped-updates",
        int,
        "stop after so many skipped updates in a row; derived: after 1 of a NaN, and "
        "after 10 of a spike",
    )
    group.value(
        "--skip-update-on-spike",
        float,
        "skip the update where the loss is above so many times its running mean",
    )
    group.value(
        "--check-weight-hash-across-dp-replicas-interval",
        int,
        "iterations between comparisons of the weights that several ranks hold alike; also before "
        "each checkpoint",
    )
    group.switch(
        "--torch-compile",
        "compile norms, activations, rotary embedding and dropout with torch's compiler; with "
        "--activation-memory-budget each layer as a whole, at one rank per layer",
    )
    group.switch("--deterministic-mode", "only algorithms that give the same bits every time")
