"""The machine whose figures a run is planned with. Standard library only."""

from __future__ import annotations

from megatron_lite.config.checks import InputError
from megatron_lite.config.json_text import shown
from megatron_lite.plan.hardware import Hardware, load_hardware, machine_names

# Parts of the names that CUDA gives to GPUs, in lower case, and their machines.
GPU_MACHINES = (("a100", "a100-80gb"), ("h100", "h100-80gb"), ("h200", "h200"), ("b200", "b200"))
CPU_MACHINE = "cpu"


def machine_of_gpu(gpu_name: str) -> Hardware | None:
    """Returns the machine with such GPUs, or None. gpu_name: as CUDA gives it."""
    words = gpu_name.lower()
    return next((load_hardware(name) for part, name in GPU_MACHINES if part in words), None)


def machine_for_policy(machine: str | None, *, device: str, gpu_name: str | None) -> Hardware:
    """Returns the machine for which `--recompute-policy auto` compares times.

    machine: the value of --machine, or None.
    device: "cpu" or "cuda". gpu_name: the name of the GPU, or None if there is none here.
    Raises InputError if no machine is known for the GPU.
    """
    if machine is not None:
        return load_hardware(machine)
    if device == "cpu":
        return load_hardware(CPU_MACHINE)
    found = None if gpu_name is None else machine_of_gpu(gpu_name)
    if found is None:
        what = (
            "no GPU is here" if gpu_name is None else f"no machine is known for {shown(gpu_name)}"
        )
        raise InputError(
            f"--recompute-policy auto compares times, and {what}: give --machine, one of "
            f"{', '.join(machine_names())}, or a file of python -m megatron_lite.tools.calibrate"
        )
    return found
