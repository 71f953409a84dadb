"""The line of an iteration: Megatron's, or a short row of a table that fits the terminal.

    iteration     loss   ms/step   tokens/s      norm        lr       ETA   kept pred./measured
       10/100   4.9146     325.4      6,295      2.79  5.78e-04   0:00:29     14.332/14.332 MiB

The row also has the samples so far, and MFU if the peak is known. `tokens/s` are those of all
ranks, and `norm` is the gradient norm before clipping. A narrow terminal gets the first columns.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple

import torch

from megatron_lite.config.units import ByteUnit
from megatron_lite.training.metrics import IterationRecord
from megatron_lite.training.peak_memory import PeakMemory

# What `peak_gib` measures, by the kind of device.
PEAK_OF = {"cuda": "allocated on the GPU by rank 0", "cpu": "resident, of the process of rank 0"}


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


class LogExtras(NamedTuple):
    """Figures computed only on logged iterations and only if asked for."""

    params_norm: float | None = None
    num_zeros: int | None = None


def iteration_line(
    records: list[IterationRecord], facts: RunFacts, extras: LogExtras, *, throughput: bool
) -> str:
    """Returns Megatron's iteration line over the records since the last line.

    Megatron's fields come first, in its order, and our own fields come after them.
    """
    last = records[-1]
    ms = sum(record.iteration_ms for record in records) / len(records)
    full_ms = full_batch_ms(records, facts)
    fields = [
        (
            f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration "
            f"{last.iteration:8d}/{facts.num_iterations:8d}"
        ),
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {ms:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {_shown(teraflops(full_ms, facts))}"
        if throughput
        else None,
        f"learning rate: {last.learning_rate:.6E}",
        f"decoupled learning rate: {last.decoupled_learning_rate:.6E}"
        if last.decoupled_learning_rate is not None
        else None,
        f"global batch size: {last.global_batch_size:5d}",
        f"lm loss: {mean_loss(records):.6E}",
        f"loss scale: {last.loss_scale:.1f}",
        f"grad norm: {last.grad_norm:.3f}",
        f"num zeros: {extras.num_zeros}" if extras.num_zeros is not None else None,
        f"params norm: {extras.params_norm:.3f}" if extras.params_norm is not None else None,
        f"number of skipped iterations: {sum(record.skipped for record in records):3d}",
        f"number of nan iterations: {sum(record.nan for record in records):3d}",
        f"tokens/s/GPU: {facts.tokens / (full_ms / 1000.0) / facts.world_size:.1f}",
        *(f"{name}: {percent:.1f}%" for name, percent in utilization(records, facts).items()),
        _activation_bytes(last),
        f"peak GiB {PEAK_OF[facts.device.type]}: {peak_gib(facts.device):.2f}",
        f"ETA: {eta(last, facts, full_ms)}",
    ]
    return " | ".join(field for field in fields if field is not None) + " |"


def short_row(
    records: Sequence[IterationRecord],
    facts: RunFacts,
    peak: PeakMemory | None,
    *,
    columns: int,
    shows_peak: bool,
) -> tuple[str, str]:
    """Returns the heading and the row of these iterations, of at most `columns` columns.

    shows_peak: whether the memory is the peak of a step (`peak`, None until it is measured) or the
        kept bytes of one micro-batch.
    """
    last, full_ms = records[-1], full_batch_ms(records, facts)
    share = utilization(records, facts)
    kept = last.activation_bytes_predicted, last.activation_bytes_measured
    if shows_peak:
        kept = (None, None) if peak is None else (peak.predicted, peak.measured)
    cells = [
        (
            "iteration",
            max(9, 2 * len(str(facts.num_iterations)) + 1),
            f"{last.iteration}/{facts.num_iterations}",
        ),
        ("loss", 7, f"{mean_loss(records):.4f}"),
        ("ms/step", 8, f"{sum(one.iteration_ms for one in records) / len(records):,.1f}"),
        ("tokens/s", 9, f"{facts.tokens / (full_ms / 1000.0):,.0f}"),
        *([("MFU", 5, f"{share['MFU']:.1f}%")] if share else []),
        ("norm", 8, f"{last.grad_norm:.3g}"),
        ("lr", 8, f"{last.learning_rate:.2e}"),
        ("ETA", 8, eta(last, facts, full_ms)),
        (f"{'peak' if shows_peak else 'kept'} pred./measured", 20, _pair(*kept)),
        ("samples", 10, str(last.consumed_samples)),
    ]
    texts = [[f"{text:>{width}}" for text in (name, value)] for name, width, value in cells]
    while sum(len(row) + 2 for _, row in texts) > columns + 2 and len(texts) > 1:
        texts.pop()
    heading, row = ("  ".join(column) for column in zip(*texts, strict=True))
    return heading, row


def _pair(predicted: int | None, measured: int | None) -> str:
    """Returns "14.332/14.332 MiB", or "-" if a figure is not known yet."""
    if predicted is None or measured is None:
        return "-"
    unit = ByteUnit.of(max(predicted, measured))
    return f"{unit.number(predicted)}/{unit.number(measured)} {unit.name}"


def mean_loss(records: Sequence[IterationRecord]) -> float:
    """Returns the mean of the losses that are finite; NaN if none is."""
    losses = [record.lm_loss for record in records if math.isfinite(record.lm_loss)]
    return sum(losses) / len(losses) if losses else math.nan


def peak_gib(device: torch.device) -> float:
    """Returns the most memory that this process has held, in GiB.

    On a GPU it is allocated memory of the device; on a CPU it is the resident set.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (2**30 if sys.platform == "darwin" else 2**20)  # macOS counts bytes


def full_batch_ms(records: Sequence[IterationRecord], facts: RunFacts) -> float:
    """Returns the milliseconds of an iteration with the full batch at the speed of `records`."""
    ms = sum(record.iteration_ms for record in records)
    return facts.batch_size * ms / sum(record.global_batch_size for record in records)


def utilization(records: Sequence[IterationRecord], facts: RunFacts) -> dict[str, float]:
    """Returns MFU and HFU of these iterations in percent of the peak, or {} if the peak is unknown.

    MFU counts model FLOPs, HFU counts hardware FLOPs (memory/predict/flops.py).
    """
    if facts.peak_flops is None:
        return {}
    available = facts.peak_flops * facts.world_size * (full_batch_ms(records, facts) / 1000.0)
    samples = sum(record.global_batch_size for record in records)
    spared = sum(facts.spared_flops.get(record.global_batch_size, 0) for record in records)
    spared_per_batch = spared * facts.batch_size / samples
    return {
        "MFU": 100.0 * facts.flops / available,
        "HFU": 100.0 * (facts.hardware_flops - spared_per_batch) / available,
    }


def _activation_bytes(record: IterationRecord) -> str | None:
    """Returns the kept bytes of one micro-batch, predicted/measured, or None if not measured."""
    predicted, measured = record.activation_bytes_predicted, record.activation_bytes_measured
    if predicted is None or measured is None:
        return None
    unit, size = ("GiB", 2**30) if max(predicted, measured) >= 0.1 * 2**30 else ("MiB", 2**20)
    return f"activation {unit} predicted/measured: {predicted / size:.3f}/{measured / size:.3f}"


def teraflops(ms: float, facts: RunFacts) -> float:
    return facts.flops / (ms / 1000.0) / facts.world_size / 1e12


def _shown(teraflops: float) -> str:
    """Returns one decimal as Megatron does, and four for the small figures of a CPU."""
    return f"{teraflops:.1f}" if teraflops >= 10.0 else f"{teraflops:.4f}"


def eta(record: IterationRecord, facts: RunFacts, full_ms: float) -> str:
    """Returns the time left at the speed of `full_ms` per full batch."""
    seconds = int(
        (facts.num_samples - record.consumed_samples) / facts.batch_size * full_ms / 1000.0
    )
    return clock(seconds)


def clock(seconds: float) -> str:
    """Returns a duration such as "1:02:03" in hours, or "3d 04:05" from a hundred hours on."""
    whole = int(seconds)
    if whole >= 360_000:
        return f"{whole // 86400}d {whole // 3600 % 24:02d}:{whole // 60 % 60:02d}"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
