"""Names the processor and the torch that compute a run, and warns if they are slow for it."""

from __future__ import annotations

import platform

import torch

# Raised whenever the same flags give other low bits on the same machine: "Bits changed" in
# CHANGELOG.md.
BITS = 2


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


def slow_precision_notices(precision: str, device: torch.device) -> tuple[str, ...]:
    """Returns the log's line about 16-bit products that torch computes in slow loops on this CPU.

    precision: "fp32", "bf16" or "fp16". There is no line if torch has fast products for it.
    """
    if device.type != "cpu" or precision == "fp32" or _multiplies_16_bits(precision):
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
