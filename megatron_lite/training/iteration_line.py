"""The record of an iteration, the facts of the run that its figures use, and its line in the log.

The line has Megatron's fields in its order, and ours after them.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.config.units import GIB, MIB
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.flops import PolicyFlops, peak_flops
from megatron_lite.memory.predict.pipeline_memory import spared_flops
from megatron_lite.recompute.schedule import plan_model

if TYPE_CHECKING:
    from .loop import Trainer

# What `peak_gib` measures, by the kind of device.
PEAK_OF = {"cuda": "allocated on the GPU by rank 0", "cpu": "resident, of the process of rank 0"}


class RunFacts(NamedTuple):
    """The facts of a run that its log lines use.

    num_samples: the samples consumed at the end of the run.
    batch_size: the full global batch size, after any ramp.
    tokens: the tokens of one iteration with the full batch, over all ranks.
    flops: the model FLOPs and the hardware FLOPs of such an iteration, over all ranks.
    beside_attention: both without the matmuls of attention, which documents make smaller.
    peak_flops: the FLOP/s of one GPU, if known.
    spared_flops: by global batch size, the hardware FLOPs that an iteration need not run, because
        some micro-batches save all activations. A size that is not a key spares none.
    """

    num_iterations: int
    num_samples: int
    batch_size: int
    tokens: int
    world_size: int
    flops: tuple[int, int]
    peak_flops: float | None
    device: torch.device
    spared_flops: Mapping[int, int] = {}
    beside_attention: tuple[int, int] = (0, 0)


class IterationRecord(NamedTuple):
    """The figures of one iteration, which every part of the log gets. A row of the metrics file
    leaves out those that are None.

    lm_loss: the mean over the global batch, in nats per token.
    grad_norm: the global 2-norm before clipping.
    learning_rate, loss_scale: the ones that this iteration used.
    tokens_per_second: the tokens of all ranks.
    skipped: 1 if no weight was changed, else 0.
    nan: 1 if the loss is NaN or infinite, else 0.
    activation_bytes_*: the kept bytes of one micro-batch in device memory, the most of any rank.
        They are measured on the run's first micro-batch.
    activation_host_bytes_*: those in host memory. None unless a policy moves tensors there.
    decoupled_learning_rate: that of the word embedding and the output layer. None without
        --decoupled-lr.
    params_norm, num_zeros: only on logged iterations, and only if asked for.
    attended: the share of attention's s x s squares that lies within documents, on all ranks. Only
        on logged iterations under --reset-attention-mask.
    load_balancing_loss, z_loss, expert_imbalance, expert_rank_imbalance: only on logged iterations
        of a model with experts (model/router.py).
    activation_bytes_balanced: the kept bytes if its routers chose every expert equally often.
    """

    iteration: int
    consumed_samples: int
    global_batch_size: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    iteration_ms: float
    tokens_per_second: float
    skipped: int
    nan: int
    activation_bytes_predicted: int | None = None
    activation_bytes_measured: int | None = None
    activation_host_bytes_predicted: int | None = None
    activation_host_bytes_measured: int | None = None
    decoupled_learning_rate: float | None = None
    params_norm: float | None = None
    num_zeros: int | None = None
    attended: float | None = None
    load_balancing_loss: float | None = None
    z_loss: float | None = None
    expert_imbalance: float | None = None
    expert_rank_imbalance: float | None = None
    activation_bytes_balanced: int | None = None


class Interval:
    """The figures of some iterations in a row, whose batches may be smaller than the full one.

    ms: the mean time of an iteration.
    loss: the mean of the losses that are finite; NaN if none is.
    flops: the model's FLOPs of a full batch that attends as the last one did.
    tokens_per_second: those of all ranks. teraflops: those of one rank.
    utilization: MFU and HFU in percent of the peak; {} if the peak is unknown. MFU counts model
        FLOPs, HFU counts hardware FLOPs (memory/predict/flops.py). Of attention all three count
        what the last iteration attended.
    eta: the time left at this speed.
    """

    def __init__(self, records: Sequence[IterationRecord], facts: RunFacts) -> None:
        self.last = records[-1]
        samples = self.skipped = self.nan = spared = 0
        milliseconds, losses = 0.0, []
        for one in records:
            milliseconds += one.iteration_ms
            samples += one.global_batch_size
            self.skipped += one.skipped
            self.nan += one.nan
            spared += facts.spared_flops.get(one.global_batch_size, 0)
            if math.isfinite(one.lm_loss):
                losses.append(one.lm_loss)
        self.ms = milliseconds / len(records)
        self.loss = sum(losses) / len(losses) if losses else math.nan
        # The seconds of an iteration with the full batch, at this speed.
        full = facts.batch_size * milliseconds / samples / 1000.0
        self.tokens_per_second = facts.tokens / full
        share = 1.0 if self.last.attended is None else self.last.attended
        self.flops, hardware_flops = [
            beside + share * (whole - beside)
            for whole, beside in zip(facts.flops, facts.beside_attention, strict=True)
        ]
        self.teraflops = self.flops / full / facts.world_size / 1e12
        self.utilization = {}
        if facts.peak_flops is not None:
            available = facts.peak_flops * facts.world_size * full
            hardware_flops -= spared * facts.batch_size / samples
            self.utilization = {
                "MFU": 100.0 * self.flops / available,
                "HFU": 100.0 * hardware_flops / available,
            }
        left = facts.num_samples - self.last.consumed_samples
        self.eta = clock(left / facts.batch_size * full)


def _scientific(value: float | None) -> str | None:
    return None if value is None else f"{value:.6E}"


def iteration_line(interval: Interval, facts: RunFacts, *, throughput: bool) -> str:
    """Returns Megatron's iteration line over the iterations since the last line."""
    last, device = interval.last, facts.device
    decimals = 1 if interval.teraflops >= 10.0 else 4  # Megatron's, or for the figures of a CPU
    fields = {
        "consumed samples": f"{last.consumed_samples:12d}",
        "elapsed time per iteration (ms)": f"{interval.ms:.1f}",
        "throughput per GPU (TFLOP/s/GPU)": f"{interval.teraflops:.{decimals}f}"
        if throughput
        else None,
        "learning rate": f"{last.learning_rate:.6E}",
        "decoupled learning rate": _scientific(last.decoupled_learning_rate),
        "global batch size": f"{last.global_batch_size:5d}",
        "lm loss": f"{interval.loss:.6E}",
        "load_balancing_loss": _scientific(last.load_balancing_loss),
        "z_loss": _scientific(last.z_loss),
        "fullest expert over the mean": _scientific(last.expert_imbalance),
        "fullest expert rank over the mean": _scientific(last.expert_rank_imbalance),
        "loss scale": f"{last.loss_scale:.1f}",
        "grad norm": f"{last.grad_norm:.3f}",
        "num zeros": last.num_zeros,
        "params norm": None if last.params_norm is None else f"{last.params_norm:.3f}",
        "number of skipped iterations": f"{interval.skipped:3d}",
        "number of nan iterations": f"{interval.nan:3d}",
        "tokens/s/GPU": f"{interval.tokens_per_second / facts.world_size:.1f}",
    }
    for name, percent in interval.utilization.items():
        fields[name] = f"{percent:.1f}%"
    predicted, measured = last.activation_bytes_predicted, last.activation_bytes_measured
    if predicted is not None and measured is not None:
        is_large = max(predicted, measured) >= 0.1 * GIB
        name, unit = ("GiB", GIB) if is_large else ("MiB", MIB)
        both = f"{predicted / unit:.3f}/{measured / unit:.3f}"
        fields[f"activation {name} predicted/measured"] = both
    fields[f"peak GiB {PEAK_OF[device.type]}"] = f"{peak_gib(device):.2f}"
    fields["ETA"] = interval.eta
    start = f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {last.iteration:8d}"
    texts = (f" | {name}: {value}" for name, value in fields.items() if value is not None)
    return f"{start}/{facts.num_iterations:8d}{''.join(texts)} |"


def peak_gib(device: torch.device) -> float:
    """Returns the most memory that this process has held, in GiB.

    On a GPU it is allocated memory of the device; on a CPU it is the resident set.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # of kilobytes


def clock(seconds: float) -> str:
    """Returns a duration such as "1:02:03" in hours, or "3d 04:05" from a hundred hours on."""
    whole = int(seconds)
    if whole >= 360_000:
        return f"{whole // 86400}d {whole // 3600 % 24:02d}:{whole // 60 % 60:02d}"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


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


def run_facts(trainer: Trainer, peak_flops: float | None) -> RunFacts:
    """Returns the facts of a run that goes from its progress now to its end."""
    config, parallel, batches = trainer.config, trainer.parallel, trainer.batches
    device = parallel.device
    num_iterations, progress = trainer.num_iterations, trainer.progress
    remaining, consumed = num_iterations - progress.iteration, progress.consumed_samples

    sizes = replace(Sizes.of(config, device.type), micro_batch_size=batches.full)
    whole, beside = (
        PolicyFlops.of(replace(sizes, attends=attends), plan_model(config))
        for attends in (True, False)
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
        world_size=parallel.world_size,
        flops=(whole.model, whole.hardware),
        beside_attention=(beside.model, beside.hardware),
        peak_flops=peak_flops,
    )
