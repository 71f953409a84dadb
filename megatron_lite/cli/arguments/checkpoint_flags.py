"""The flags of CheckpointConfig."""

from __future__ import annotations

import argparse

from megatron_lite.cli.arguments.flag_group import FlagGroup
from megatron_lite.config.checkpoint_settings import CheckpointConfig


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    group = FlagGroup(parser, "checkpoints", CheckpointConfig)
    group.value("--save", str, "directory to write checkpoints into")
    group.value(
        "--save-interval", int, "iterations between checkpoints", alias="--persistent-save-interval"
    )
    group.value(
        "--save-retain-interval",
        int,
        "keep the checkpoints of iterations that are multiples of it, and the last ones",
    )
    group.value(
        "--save-keep-last",
        int,
        "keep the last so many checkpoints; default: all, with --save-retain-interval 1",
    )
    group.switch(
        "--async-save", "train on while a checkpoint is written, once its tensors are copied"
    )
    group.value("--load", str, "directory to read the newest checkpoint from")
    group.switch("--allow-fresh-start", "start from scratch where --load finds no checkpoint")
    group.switch("--finetune", "take the weights only, and start at iteration 0")
    group.switch("--no-load-optim", "do not read the optimizer's state")
    group.switch("--no-load-rng", "do not read the states of the random streams")
    group.switch(
        "--no-load-fallback",
        "stop where the newest checkpoint is damaged, instead of using the one before it",
    )
    group.switch("--allow-changed-data", "go on with other data than the checkpoint's run has read")
