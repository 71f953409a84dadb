"""Collects every notice of a run in one function, and names the processor that computes it.

The command line calls it, and so does a program that builds a trainer by itself.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_lite.config.notices import notices
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.torch_internals import missing_notices
from megatron_lite.training.apex_kernels import kernel_notices

# Raised whenever the same flags give other low bits on the same machine: "Bits changed" in
# CHANGELOG.md.
BITS = 2


class RunNotices(NamedTuple):
    """The notices of a run, one line each.

    at_start: notices that are known before anything is built. pretrain_gpt.py prints them.
    in_log: notices that `Trainer.run` writes to the log.
    """

    at_start: tuple[str, ...]
    in_log: tuple[str, ...]


def run_notices(
    config: RunConfig, *, device: str, world_size: int, of_settings: Sequence[str] | None = None
) -> RunNotices:
    """Returns the notices of a run of `config` for its user.

    device: "cpu" or "cuda".
    world_size: the number of ranks.
    of_settings: the notices of a command line. They include those that the configuration alone
        shows. None computes the latter.
    Notices about files (checkpoints, locks) are not known yet. They appear in the log later.
    Raises ValueError if the number of ranks is not a multiple of one model's ranks.
    """
    settings = notices(config, "settings") if of_settings is None else of_settings
    return RunNotices(
        (*settings, *notices(config, "placement", device=device, world_size=world_size)),
        (
            *missing_notices(),
            *_verify_notices(config, device),
            *_precision_notices(config.training.precision, device),
            *kernel_notices(config, device),
            *notices(config, "log", world_size=world_size),
        ),
    )


def _verify_notices(config: RunConfig, device: str) -> list[str]:
    """Returns the line about what --recompute-verify cannot compare on a GPU."""
    if (
        not config.recompute.recompute_verify
        or device == "cpu"
        or config.training.deterministic_mode
    ):
        return []
    return [
        "--recompute-verify compares what replays rebuild. It cannot compare gradients here: "
        "without --deterministic-mode the backward kernels of a GPU do not repeat their own bits"
    ]


def described(device: torch.device) -> str:
    """Returns one line about what computes, for a reader who compares it with another run's.

    Runs with different lines can differ in their low bits. Equal lines promise nothing.
    """
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return f"{name}, torch {torch.__version__}, bits {BITS}"
    threads = torch.get_num_threads()
    return (
        f"{platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}, "
        f"{threads} {'thread' if threads == 1 else 'threads'} a rank, torch {torch.__version__}, "
        f"bits {BITS}"
    )


def moved_notices(computed_on: str, computes_on: str) -> tuple[str, ...]:
    """Returns the log's line about a checkpoint that something else computed; none if it did not.

    computed_on: what computed the checkpoint (`described`); "" if that is not known.
    """
    if computed_on in ("", computes_on):
        return ()
    return (
        f"the checkpoint was computed on {computed_on}; this run computes on {computes_on}, so its "
        "results can have other low bits than those of a run that stayed there",
    )


def _precision_notices(precision: str, device: str) -> tuple[str, ...]:
    """Returns the log's line about 16-bit products that torch computes in slow loops on this CPU.

    precision: "fp32", "bf16" or "fp16". There is no line if torch has fast products for it.
    """
    if device != "cpu" or precision == "fp32" or _multiplies_16_bits(precision):
        return ()
    return (
        f"--{precision} on this CPU: its torch has only slow loops for products of 16 bits, which "
        f"take up to a hundred times as long as those of float32. Leave --{precision} out here",
    )


def _multiplies_16_bits(precision: str) -> bool:
    """Returns whether oneDNN, to which torch sends 16-bit products, has instructions for them."""
    question = f"_is_mkldnn_{precision}_supported"
    if not torch.backends.mkldnn.is_available():
        return False
    return not hasattr(torch.ops.mkldnn, question) or bool(getattr(torch.ops.mkldnn, question)())
