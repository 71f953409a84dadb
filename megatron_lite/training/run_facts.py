"""The facts of a run that its log lines use: batch sizes, FLOPs, and the samples at its end."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from megatron_lite.checkpointing.metadata import Progress
from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.memory.predict.flops import hardware_flops, peak_flops, step_flops
from megatron_lite.memory.predict.pipeline_memory import spared_flops
from megatron_lite.recompute.schedule import plan_model


class RunFacts(NamedTuple):
    """The facts of a run that its log lines use.

    num_samples: the samples consumed at the end of the run.
    batch_size: the full global batch size, after any ramp.
    tokens: the tokens of one iteration with the full batch, over all ranks.
    flops, hardware_flops: the model FLOPs and hardware FLOPs of such an iteration, over all ranks.
    peak_flops: the FLOP/s of one GPU, if known.
    spared_flops: by global batch size, the hardware FLOPs that an iteration need not run, because
        some micro-batches save all activations. A size that is not a key spares none.
    """

    num_iterations: int
    num_samples: int
    batch_size: int
    tokens: int
    world_size: int
    flops: int
    hardware_flops: int
    peak_flops: float | None
    device: torch.device
    spared_flops: Mapping[int, int] = MappingProxyType({})


class PeakRate(NamedTuple):
    """The peak of one rank, by which MFU and HFU divide.

    flops: in FLOP/s, or None if it is neither stated nor measured.
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
        from megatron_lite.plan.hardware import load_hardware

        machine = load_hardware(config.machine)
        if machine.device == device.type:
            rates = machine.matmuls(2 if bf16 else 4)
            return PeakRate(rates.peak_flops, f"--machine {config.machine}")
    return PeakRate(None, name)


def run_facts(
    config: RunConfig,
    batches: BatchSchedule,
    progress: Progress,
    *,
    num_iterations: int,
    world_size: int,
    device: torch.device,
    peak: PeakRate,
) -> RunFacts:
    """Returns the facts of a run that goes from `progress` to the end of `num_iterations`."""
    tp_size = config.parallel.tensor_model_parallel_size
    remaining, consumed = num_iterations - progress.iteration, progress.consumed_samples
    shape = dict(
        batch=batches.full,
        seq_length=config.data.seq_length,
        padded_vocab_size=config.tokenizer.padded_vocab_size(tp_size),
    )
    return RunFacts(
        num_iterations=num_iterations,
        batch_size=batches.full,
        device=device,
        tokens=batches.full * config.data.seq_length,
        num_samples=batches.consumed_after(remaining, consumed=consumed),
        spared_flops={
            size: spared_flops(
                config,
                batches.num_microbatches(size),
                device=device.type,
                samples_per_microbatch=batches.samples_per_microbatch,
            )
            for size in batches.sizes_from(consumed, num_iterations=remaining)
        },
        world_size=world_size,
        flops=step_flops(config.model, **shape),
        hardware_flops=hardware_flops(
            config.model,
            plan_model(config),
            **shape,
            device=device.type,
            loss_chunk_size=config.loss_chunk_size,
            loss_in_one_pass=config.loss_in_one_pass,
            tp_size=tp_size,
            cp_size=config.parallel.context_parallel_size,
        ),
        peak_flops=peak.flops,
    )
