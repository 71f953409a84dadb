"""The notices that need torch, and the name of the processor that computes a run."""

from __future__ import annotations

import platform

import torch

from megatron_lite.config.notices import Here, notices
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel import apex, torch_internals

# Raised whenever the same flags give other low bits on the same machine: "Bits changed" in
# CHANGELOG.md.
BITS = 2


def log_notices(config: RunConfig, *, device: str, world_size: int) -> list[str]:
    """Returns the notices that only the log has, about kernels and about this machine.

    device: "cpu" or "cuda".
    Raises ValueError if the number of ranks is not a multiple of one model's ranks.
    """
    missing = ", ".join(torch_internals.MISSING)
    here = Here(
        f"torch {torch.__version__} lacks {missing}" if missing else "",
        apex.notice(),
        _multiplies_16_bits(config.training.precision),
    )
    return notices(config, "log", device=device, world_size=world_size, here=here)


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


def moved_from(computed_on: str, computes_on: str) -> tuple[str, ...]:
    """Returns the log's line about a checkpoint that something else computed; none if it did not.

    computed_on: what computed the checkpoint (`described`); "" if that is not known.
    """
    if computed_on in ("", computes_on):
        return ()
    return (
        f"the checkpoint was computed on {computed_on}; this run computes on {computes_on}, so its "
        "results can have other low bits than those of a run that stayed there",
    )


def _multiplies_16_bits(precision: str) -> bool:
    """Returns whether oneDNN, to which torch sends 16-bit products, has instructions for them."""
    question = f"_is_mkldnn_{precision}_supported"
    if precision == "fp32" or not torch.backends.mkldnn.is_available():
        return precision == "fp32"
    return not hasattr(torch.ops.mkldnn, question) or bool(getattr(torch.ops.mkldnn, question)())
