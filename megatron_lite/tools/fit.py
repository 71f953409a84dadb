"""Finds the recompute policy of a transformers model on a GPU that is not here:
`megatron-lite fit --hf-config config.json --gpu h100-80gb --seq-length 8192 --micro-batch-size 4`

The model of the configuration runs a step on fake tensors, which have sizes and no memory. So
neither weights nor a GPU are needed. The operators are those of a CPU, whose tensors are those of a
GPU but for workspaces inside kernels. The time is an estimate. The exit status is 0 if the step
fits, and 2 if it does not or if the input has a fault.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.config.checks import InputError, input_faults
from megatron_lite.config.input_file import read_json
from megatron_lite.config.plain import shown
from megatron_lite.config.run_flags import Parser
from megatron_lite.config.units import parse_bytes
from megatron_lite.plan.auto_policy import default_reserve
from megatron_lite.plan.hardware import load_hardware
from megatron_lite.tools.command import exit_status

MOST_GPUS = 16384


def main(argv: Sequence[str] | None = None, program: str = "megatron-lite fit") -> int:
    """Runs the command line. Returns the exit status."""
    parser = Parser(
        prog=program,
        description="Finds the fastest recompute policy with which a step of a transformers model "
        "fits a GPU, without the weights and without the GPU.",
    )
    add = parser.add_argument
    add(
        "--hf-config", required=True, metavar="FILE", help="config.json of the model, or its folder"
    )
    add("--gpu", required=True, metavar="NAME", help="such as h100-80gb, or a file of calibrate")
    add(
        "--memory-budget",
        metavar="BYTES",
        help="such as 70GiB (default: the GPU's, less a reserve)",
    )
    add("--seq-length", type=int, default=0, metavar="N", help="tokens of a sample of text")
    add("--image-size", type=int, default=0, metavar="N", help="of images that may have any size")
    add("--micro-batch-size", type=int, default=1, metavar="N", help="samples (default: 1)")
    add(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        default="bf16",
        help="of weights and computation",
    )
    add("--gpus", type=int, default=1, metavar="N", help="data-parallel GPUs (default: 1)")
    add("--fsdp", action="store_true", help="shard each layer over the GPUs (default: DDP)")
    add("--optimizer", choices=("adamw", "sgd", "none"), default="adamw", help="whose states count")
    add("--trainable", default="all", metavar="WHAT", help="all, or lora:RANK on linear layers")
    args = parser.parse_args(argv)
    return exit_status(lambda: print(_text(args)), parser.prog)


def _text(args: argparse.Namespace) -> str:
    path = Path(args.hf_config)
    with input_faults(f"{path}: "):
        config = read_json(path / "config.json" if path.is_dir() else path)
    if not isinstance(config, dict) or "model_type" not in config:
        raise InputError(f"{path}: no configuration of transformers: model_type is missing")
    if args.micro_batch_size < 1:
        raise InputError(f"--micro-batch-size must be at least 1 (got {args.micro_batch_size})")
    if args.gpus > MOST_GPUS:
        raise InputError(f"--gpus must be at most {MOST_GPUS} (got {args.gpus})")
    if args.gpus < 1 + args.fsdp:
        raise InputError(
            f"--gpus must be at least {1 + args.fsdp}{' with --fsdp' * args.fsdp} (got {args.gpus})"
        )
    what, _, rank = args.trainable.partition(":")
    if args.trainable != "all" and (what != "lora" or not rank.isdecimal() or int(rank) < 1):
        raise InputError(f"--trainable {shown(repr(args.trainable))}: give all, or lora:16")
    hardware = load_hardware(args.gpu)
    budget = hardware.memory_bytes - default_reserve(hardware.memory_bytes)
    if args.memory_budget is not None:
        with input_faults():
            budget = parse_bytes("--memory-budget", args.memory_budget, least=1)
    from megatron_lite.tools.fake_fit import fit_config

    same = ("seq_length", "image_size", "micro_batch_size", "dtype", "optimizer", "gpus", "fsdp")
    with input_faults():
        fit = fit_config(
            config,
            hardware,
            budget,
            lora_rank=int(rank or 0),
            **{name: getattr(args, name) for name in same},
        )
    lines = "\n".join(
        f'apply_policy_(model, layers_fqn="{name}", policy="{policy}")'
        for name, policy in fit.policies.items()
    )
    ranks = f"each of {args.gpus} GPUs under {'FSDP2' if args.fsdp else 'DDP'}: "
    return (
        f"{ranks * (args.gpus > 1)}{fit}\n\n"
        f"In Python:\n\nfrom megatron_lite.api import apply_policy_\n\n{lines}\n\n"
        "In the Trainer of transformers, which measures it on the GPU:\n\n"
        "from megatron_lite.fit.trainer_callback import MemoryBudgetCallback\n\n"
        f'trainer.add_callback(MemoryBudgetCallback("{budget // 2**20}MiB"))'
    )
