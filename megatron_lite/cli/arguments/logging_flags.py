"""The flags of LoggingConfig and ProfilingConfig."""

from __future__ import annotations

import argparse

from megatron_lite.cli.arguments.flag_group import FlagGroup
from megatron_lite.config.logging_settings import LOG_STYLES, TIMING_LOG_OPTIONS, LoggingConfig
from megatron_lite.config.profiling import ProfilingConfig


def add_logging_flags(parser: argparse.ArgumentParser) -> None:
    group = FlagGroup(parser, "logging", LoggingConfig)
    group.value("--log-interval", int, "iterations between two lines")
    group.value(
        "--log-style",
        str,
        "standard output: short lines of at most 120 columns, or Megatron's table of arguments and "
        "iteration line, which the log file always has",
        values=LOG_STYLES,
    )
    group.value(
        "--log-file",
        str,
        "file to which the whole log is appended; derived: train.log in the folder of --save, or "
        "else of --tensorboard-dir",
    )
    group.value(
        "--peak-tflops-per-gpu",
        float,
        "dense peak in TFLOP/s, for MFU and HFU; derived from the GPU's name and dtype",
    )
    group.value(
        "--metrics-jsonl", str, "file for one JSON object per iteration, with full precision"
    )
    group.value("--tensorboard-dir", str, "directory for TensorBoard")
    group.value(
        "--memory-timeline",
        str,
        "file for the memory of one micro-batch, operator by operator, as JSON; "
        "python -m megatron_lite.tools.plot_memory draws it",
    )
    group.switch(
        "--log-peak-memory",
        "measure the peak of the second step on a CPU too, beside the predicted one; takes seconds",
    )
    group.value(
        "--machine",
        str,
        "predict the time of a step for this machine: a name of tools/plan.py, or a JSON file of "
        "tools/calibrate.py; derived from the GPU's name",
    )
    group.switch("--log-throughput", "TFLOP/s per GPU in Megatron's iteration line")
    group.switch("--log-params-norm", "norm of all weights")
    group.switch("--log-num-zeros-in-grad", "number of gradient elements that are zero")
    group.switch("--log-validation-ppl-to-tensorboard", "validation perplexity in TensorBoard")
    group.switch("--log-timers-to-tensorboard", "iteration time in TensorBoard")
    group.switch("--log-memory-to-tensorboard", "all figures of the CUDA allocator in TensorBoard")
    group.switch("--log-world-size-to-tensorboard", "number of ranks in TensorBoard")
    group.off_switch(
        "--no-log-loss-scale-to-tensorboard",
        "log_loss_scale_to_tensorboard",
        "no loss scale in TensorBoard",
        alias="--disable-log-loss-scale-to-tensorboard",
    )
    group.value(
        "--tensorboard-log-interval", int, "iterations between two points in TensorBoard and W&B"
    )
    group.value(
        "--wandb-project",
        str,
        "project of an offline run of Weights & Biases, which gets the scalars of TensorBoard; "
        "needs the package wandb",
    )
    group.value("--wandb-exp-name", str, "its name")
    group.value("--wandb-save-dir", str, "its folder; derived: DIR/wandb of --save DIR")
    group.value("--wandb-entity", str, "its owner")
    group.value(
        "--timing-log-level",
        int,
        "1: time the parts of a step; 2: and those of each micro-batch. Both wait for the GPU",
    )
    group.value(
        "--timing-log-option",
        str,
        "times of the fastest and slowest rank, of the slowest, or of all",
        values=TIMING_LOG_OPTIONS,
    )
    group.switch(
        "--log-straggler",
        "name the slowest ranks, where they are slower than the others of their stage",
    )
    group.value("--straggler-minmax-count", int, "how many of them at most")
    group.value("--straggler-ratio", float, "how many times the median's time a slow rank takes")


def add_profiling_flags(parser: argparse.ArgumentParser) -> None:
    group = FlagGroup(parser, "profiling", ProfilingConfig)
    group.switch(
        "--profile", "profile some iterations, for Nsight Systems or with --use-pytorch-profiler"
    )
    group.value("--profile-step-start", int, "the iteration after which profiling begins")
    group.value("--profile-step-end", int, "the last iteration that is profiled")
    group.value("--profile-ranks", int, "global ranks to profile; all if omitted", nargs="+")
    group.switch(
        "--use-pytorch-profiler",
        "write a Chrome trace of each rank to torch_profile/ under --tensorboard-dir, else --save",
    )
    group.switch("--pytorch-profiler-collect-shapes", "shapes of tensors in the trace")
    group.switch("--pytorch-profiler-collect-callstack", "Python's stack in the trace")
    group.switch("--record-shapes", "operators with shapes for Nsight Systems")
    group.switch("--nvtx-ranges", "operators for Nsight Systems")
    group.switch(
        "--record-memory-history",
        "write CUDA's allocations to --memory-snapshot-path at each --log-interval",
    )
    group.value("--memory-snapshot-path", str, "file for them; _RANK is put before its last suffix")
