"""Finds the recompute policy of a transformers model on a GPU that is not here:
`megatron-lite fit --hf-config config.json --gpu h100-80gb --seq-length 8192 --micro-batch-size 4`

The model of the configuration runs a step on fake tensors, which have sizes and no memory. So
neither weights nor a GPU are needed. The operators are those of a CPU, whose tensors are those of a
GPU but for workspaces inside kernels. The time is an estimate. The exit status is 0 if the step
fits, and 2 if it does not or if the input has a fault.
"""

import re
from pathlib import Path

from megatron_lite.config.checks import InputError, input_faults, quoted
from megatron_lite.config.input_file import read_json
from megatron_lite.config.run_flags import add_settings, taken
from megatron_lite.config.setting import Settings, count, required, setting, switch
from megatron_lite.config.units import MIB, parse_bytes
from megatron_lite.plan.auto_policy import default_reserve
from megatron_lite.plan.hardware import load_hardware

from .command import tool

MOST_GPUS = 16384


class FitSettings(Settings):
    """The model, the GPU and the step. trainable: "all", or "lora:RANK"."""

    hf_config: str = required("config.json of the model, or its folder")
    gpu: str = required("such as h100-80gb, or a file of calibrate")
    memory_budget: str | None = setting("such as 70GiB (default: the GPU's, less a reserve)")
    seq_length: int = setting("tokens of a text, samples of a sound, frames of a spectrum", 0)
    image_size: int = setting("side of images in pixels (default: the model's)", 0)
    micro_batch_size: int = count("samples", 1)
    dtype: str = setting("of weights and computation", "bf16", choices="bf16 fp16 fp32")
    gpus: int = count("data-parallel GPUs", 1, most=MOST_GPUS)
    fsdp: bool = switch("shard each layer over the GPUs (default: DDP)", needs="gpus>1")
    optimizer: str = setting("whose states count", "adamw", choices="adamw sgd none")
    trainable: str = setting("all, or lora:RANK on linear layers", "all")

    def check_rules(self) -> None:
        if not re.fullmatch(r"all|lora:0*[1-9]\d*", self.trainable):
            raise ValueError(f"--trainable {quoted(self.trainable)}: give all, or lora:16")


main = tool(
    "megatron-lite fit",
    "Finds the fastest recompute policy with which a step of a transformers model fits a GPU, "
    "without the weights and without the GPU.",
    lambda parser: add_settings(parser, FitSettings),
    lambda args: print(_text(taken(FitSettings, args))),
)


def _text(given: FitSettings) -> str:
    path = Path(given.hf_config)
    with input_faults(f"{path}: "):
        file = path / "config.json" if path.is_dir() else path
        config = read_json(file, strict=False)  # Mamba's have an Infinity
    if not isinstance(config, dict) or "model_type" not in config:
        raise InputError(f"{path}: no configuration of transformers: model_type is missing")
    hardware = load_hardware(given.gpu)
    budget = hardware.memory_bytes - default_reserve(hardware.memory_bytes)
    budget -= budget % MIB
    from .fake_fit import fit_config

    with input_faults():
        if given.memory_budget:
            budget = parse_bytes("--memory-budget", given.memory_budget, least=1, needs_unit=True)
        fit = fit_config(config, hardware, budget, given)
    lines = "\n".join(
        f'apply_policy_(model, layers_fqn="{name}", policy="{policy}")'
        for name, policy in fit.policies.items()
    )
    ranks = f"each of {given.gpus} GPUs under {'FSDP2' if given.fsdp else 'DDP'}: "
    amount = f"{budget}B" if budget % MIB else f"{budget // MIB}MiB"
    return (
        f"{ranks * (given.gpus > 1)}{fit}\n\n"
        "In Python (verify=False: a verified call takes more):\n\n"
        f"from megatron_lite.api import apply_policy_\n\n{lines}\n\n"
        "In the Trainer of transformers, which measures it on the GPU:\n\n"
        "from megatron_lite.api import MemoryBudgetCallback\n\n"
        f'trainer.add_callback(MemoryBudgetCallback("{amount}"))'
    )
