"""What a person and a program read while training: Megatron's lines, a progress bar, JSON lines, TensorBoard.

Only rank 0 writes; the other ranks hold a RunLog that stays silent, so that no caller asks for its rank.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from contextlib import ExitStack
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from megatron_lite.checkpointing.progress import Progress
from megatron_lite.config.checks import InputError
from megatron_lite.config.training import LoggingConfig
from megatron_lite.memory.flops import peak_flops
from megatron_lite.training.evaluate import Evaluation
from megatron_lite.training.metrics import IterationRecord, MetricsFile
from megatron_lite.training.skipped import SkippedUpdate

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class RunFacts(NamedTuple):
    """What log lines need to know of the run. num_samples: consumed at its end. batch_size: the full one.

    tokens, flops (model FLOPs), hardware_flops: of one iteration with the full batch, over all ranks. peak_flops: what one GPU
    can do in a second, if known.
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


class LogExtras(NamedTuple):
    """Figures computed only on logged iterations and only if asked for."""

    params_norm: float | None = None
    num_zeros: int | None = None


class RunLog:
    """The log of one run. `start`: how far it had come before; later rows and points of an interrupted run are dropped.

    skipped_batches: file for what `skipped` is told; without a skipped update there is none.
    """

    def __init__(self, config: LoggingConfig, facts: RunFacts, *, enabled: bool, start: Progress,
                 skipped_batches: str | None = None) -> None:
        self._config = config
        self._facts = facts
        self._enabled = enabled
        self._interval: list[IterationRecord] = []
        self._stack = ExitStack()
        self._progress: ProgressBar | None = None
        self._metrics: MetricsFile | None = None
        self._tensorboard: SummaryWriter | None = None
        self._skipped_batches = skipped_batches
        self._skipped_rows: MetricsFile | None = None
        if not enabled:
            return
        if skipped_batches is not None and os.path.exists(skipped_batches):
            self._skipped_rows = self._stack.enter_context(MetricsFile(skipped_batches, after_iteration=start.iteration))
        if config.metrics_jsonl:
            self._metrics = self._stack.enter_context(MetricsFile(config.metrics_jsonl, after_iteration=start.iteration))
        if config.tensorboard_dir:
            try:
                os.makedirs(config.tensorboard_dir, exist_ok=True)
            except OSError as error:
                raise InputError(f"--tensorboard-dir {config.tensorboard_dir}: cannot be written ({error.strerror})") from error
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = self._stack.enter_context(SummaryWriter(config.tensorboard_dir, purge_step=start.iteration + 1))
            # A writer of its own: its steps are samples, and the other's purge_step counts iterations.
            self._by_samples = self._stack.enter_context(SummaryWriter(
                os.path.join(config.tensorboard_dir, "by_samples"), purge_step=start.consumed_samples + 1))
        if sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"),
                       TimeElapsedColumn())
            self._progress = self._stack.enter_context(ProgressBar(*columns, console=Console(soft_wrap=True)))
            self._task = self._progress.add_task("training", total=facts.num_iterations, completed=start.iteration, status="")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def line(self, text: str) -> None:
        """Prints one line."""
        if not self._enabled:
            return
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def iteration(self, record: IterationRecord, extras: LogExtras) -> None:
        """Takes one iteration's figures; prints Megatron's line, averaged since the last one, every --log-interval iterations."""
        if not self._enabled:
            return
        if self._metrics is not None:
            self._metrics.write(record)
        if self._tensorboard is not None:
            _write_scalars(self._tensorboard, record, extras, self._facts, self._config)
            self._by_samples.add_scalar("lm loss vs samples", record.lm_loss, record.consumed_samples)
        if self._progress is not None:
            self._progress.update(self._task, completed=record.iteration, status=(
                f"loss {record.lm_loss:.4f} | {record.tokens_per_second:,.0f} tokens/s | "
                f"ETA {_eta(record, self._facts, _full_batch_ms([record], self._facts))}"))
        self._interval.append(record)
        if record.iteration % self._config.log_interval == 0 or record.iteration == self._facts.num_iterations:
            self.line(iteration_line(self._interval, self._facts, extras, throughput=self._config.log_throughput))
            self._interval.clear()

    def skipped(self, update: SkippedUpdate) -> None:
        """Takes a skipped update: a line in the log, and a row in its file. An overflow of a float16 run has the row alone."""
        if not self._enabled:
            return
        if update.reason != "overflow":
            self.line(update.line())
        if self._skipped_batches is not None and self._skipped_rows is None:
            self._skipped_rows = self._stack.enter_context(
                MetricsFile(self._skipped_batches, after_iteration=update.iteration - 1))
        if self._skipped_rows is not None:
            self._skipped_rows.write(update)

    def evaluation(self, name: str, iteration: int, result: Evaluation) -> None:
        """Prints the loss and perplexity of a validation or test pass."""
        text = (f" {name} loss at iteration {iteration} | lm loss value: {result.loss:.6E} | "
                f"lm loss PPL: {result.perplexity:.6E} | ")
        rule = "-" * len(text)
        self.line(f"{rule}\n{text}\n{rule}")
        if self._tensorboard is not None:
            self._tensorboard.add_scalar(f"lm loss {name}", result.loss, iteration)
            if self._config.log_validation_ppl_to_tensorboard:
                self._tensorboard.add_scalar(f"lm loss {name} ppl", result.perplexity, iteration)


def iteration_line(records: list[IterationRecord], facts: RunFacts, extras: LogExtras, *, throughput: bool) -> str:
    """Megatron's iteration line over the records since the last one, with its fields in its order, then our own."""
    last = records[-1]
    ms, full_ms = sum(record.iteration_ms for record in records) / len(records), _full_batch_ms(records, facts)
    losses = [record.lm_loss for record in records if math.isfinite(record.lm_loss)]
    fields = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {last.iteration:8d}/{facts.num_iterations:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {ms:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {_shown(_teraflops(full_ms, facts))}" if throughput else None,
        f"learning rate: {last.learning_rate:.6E}",
        f"global batch size: {last.global_batch_size:5d}",
        f"lm loss: {sum(losses) / len(losses) if losses else math.nan:.6E}",
        f"loss scale: {last.loss_scale:.1f}",
        f"grad norm: {last.grad_norm:.3f}",
        f"num zeros: {extras.num_zeros}" if extras.num_zeros is not None else None,
        f"params norm: {extras.params_norm:.3f}" if extras.params_norm is not None else None,
        f"number of skipped iterations: {sum(record.skipped for record in records):3d}",
        f"number of nan iterations: {sum(record.nan for record in records):3d}",
        f"tokens/s/GPU: {facts.tokens / (full_ms / 1000.0) / facts.world_size:.1f}",
        *(f"{name}: {percent:.1f}%" for name, percent in _utilization(full_ms, facts).items()),
        _activation_bytes(last),
        f"peak GiB: {peak_gib(facts.device):.2f}",
        f"ETA: {_eta(last, facts, full_ms)}",
    ]
    return " | ".join(field for field in fields if field is not None) + " |"


def known_peak_flops(config: LoggingConfig, device: torch.device, *, bf16: bool) -> float | None:
    """FLOP/s of one GPU: --peak-tflops-per-gpu, or found by the GPU's name. None where neither says it, as on a CPU."""
    if config.peak_tflops_per_gpu is not None:
        return config.peak_tflops_per_gpu * 1e12
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), bf16=bf16, tf32=torch.backends.cuda.matmul.allow_tf32)


def peak_gib(device: torch.device) -> float:
    """The most memory this process has held: allocated on the GPU, or resident on a CPU run."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (2**30 if sys.platform == "darwin" else 2**20)  # macOS counts bytes


def _full_batch_ms(records: list[IterationRecord], facts: RunFacts) -> float:
    """What an iteration with the full batch takes at the speed of these."""
    return facts.batch_size * sum(record.iteration_ms for record in records) / sum(record.global_batch_size for record in records)


def _utilization(ms: float, facts: RunFacts) -> dict[str, float]:
    """MFU and HFU in percent of the peak: model and hardware FLOPs (see memory/flops.py). Empty where the peak is unknown."""
    if facts.peak_flops is None:
        return {}
    available = facts.peak_flops * facts.world_size * (ms / 1000.0)
    return {"MFU": 100.0 * facts.flops / available, "HFU": 100.0 * facts.hardware_flops / available}


def _activation_bytes(record: IterationRecord) -> str | None:
    """Bytes kept for backward, predicted/measured."""
    predicted, measured = record.activation_bytes_predicted, record.activation_bytes_measured
    if predicted is None or measured is None:
        return None
    unit, size = ("GiB", 2**30) if max(predicted, measured) >= 0.1 * 2**30 else ("MiB", 2**20)
    return f"activation {unit}: {predicted / size:.3f}/{measured / size:.3f}"


def _teraflops(ms: float, facts: RunFacts) -> float:
    return facts.flops / (ms / 1000.0) / facts.world_size / 1e12


def _shown(teraflops: float) -> str:
    """One decimal, as Megatron; more for a CPU's few."""
    return f"{teraflops:.1f}" if teraflops >= 10.0 else f"{teraflops:.4f}"


def _eta(record: IterationRecord, facts: RunFacts, full_ms: float) -> str:
    seconds = int((facts.num_samples - record.consumed_samples) / facts.batch_size * full_ms / 1000.0)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _write_scalars(writer: SummaryWriter, record: IterationRecord, extras: LogExtras, facts: RunFacts,
                   config: LoggingConfig) -> None:
    full_ms = _full_batch_ms([record], facts)
    scalars: dict[str, float | None] = {
        "learning-rate": record.learning_rate, "batch-size": record.global_batch_size, "lm loss": record.lm_loss,
        "loss-scale": record.loss_scale, "grad-norm": record.grad_norm,
        "num-zeros": extras.num_zeros, "params-norm": extras.params_norm,
        "throughput": _teraflops(full_ms, facts) if config.log_throughput else None,
        "iteration-time": record.iteration_ms / 1000.0 if config.log_timers_to_tensorboard else None,
        "mem-peak-gib": peak_gib(facts.device) if config.log_memory_to_tensorboard else None,
        **_utilization(full_ms, facts),
    }
    for name, value in scalars.items():
        if value is not None:
            writer.add_scalar(name, value, record.iteration)


