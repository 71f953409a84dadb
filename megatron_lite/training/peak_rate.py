"""The peak FLOP/s that MFU and HFU divide by: None if it is neither stated nor measured."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.memory.predict.flops import peak_flops
from megatron_lite.plan.hardware import load_hardware


class PeakRate(NamedTuple):
    """The peak of one rank.

    flops: in FLOP/s, or None if it is not known.
    source: where the figure is from. If it is not known: the processor that has no figure.
    """

    flops: float | None
    source: str

    def line(self) -> str:
        """Returns the line of the log about MFU."""
        if self.flops is None:
            return (
                f"MFU is left out: the peak FLOP/s of {self.source} is not known "
                "(--peak-tflops-per-gpu X or --machine FILE gives it)"
            )
        return f"MFU is relative to {self.flops / 1e12:g} TFLOP/s per rank, from {self.source}"


def peak_rate(config: LoggingConfig, device: torch.device, *, bf16: bool) -> PeakRate:
    """Returns the peak of one rank: from --peak-tflops-per-gpu, the GPU's name, or --machine FILE.

    FILE is one of tools/calibrate.py, which measures the rates of matmuls. The machines that the
    planner knows by name do not count: their names choose what is predicted, and the figures of
    `cpu` are an assumption.
    """
    if config.peak_tflops_per_gpu is not None:
        return PeakRate(config.peak_tflops_per_gpu * 1e12, "--peak-tflops-per-gpu")
    name = "this CPU"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = peak_flops(name, bf16=bf16, tf32=torch.backends.cuda.matmul.allow_tf32)
        if known is not None:
            return PeakRate(known, f"the data sheet of {name}")
    if config.machine is not None and config.machine.endswith(".json"):
        machine = load_hardware(config.machine)
        if machine.device == device.type:
            rates = machine.matmuls(2 if bf16 else 4)
            return PeakRate(rates.peak_flops, f"--machine {config.machine}")
    return PeakRate(None, name)
