"""The log of a run: Megatron's lines, a progress bar, JSON lines and TensorBoard.

Only rank 0 writes. The other ranks hold a RunLog that writes nothing, so no caller needs to check
its rank.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from megatron_lite.checkpointing.progress import Progress
from megatron_lite.config.checks import InputError
from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.training.evaluate import Evaluation
from megatron_lite.training.iteration_line import (
    LogExtras,
    RunFacts,
    eta,
    full_batch_ms,
    iteration_line,
    peak_gib,
    teraflops,
    utilization,
)
from megatron_lite.training.metrics import IterationRecord, MetricsFile
from megatron_lite.training.run_summary import RunSummary, write_summary
from megatron_lite.training.skipped import SkippedUpdate
from megatron_lite.training.tensorboard import ScalarFile
from megatron_lite.training.timers import Times
from megatron_lite.training.wandb_run import WandbRun

# The scalars that TensorBoard also gets over the consumed samples, as in Megatron.
BY_SAMPLES = (
    *("learning-rate", "batch-size", "lm loss", "loss-scale", "world-size"),
    *("grad-norm", "num-zeros", "params-norm"),
)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # faults of a disk, not of a wrong path


class RunLog:
    """The log of one run. A log that can no longer be written does not end the run.

    start: the progress at the start. Rows and points that an earlier run wrote past it are dropped.
    skipped_batches: the file for skipped updates. The first skipped update creates it.
    wandb: gets the same scalars as TensorBoard; the log closes it.
    keep_last: --save-keep-last, which also limits how many earlier versions of these files stay.
    """

    def __init__(
        self,
        config: LoggingConfig,
        facts: RunFacts,
        *,
        enabled: bool,
        start: Progress,
        skipped_batches: str | None = None,
        keep_last: int | None = None,
        wandb: WandbRun | None = None,
    ) -> None:
        self._config = config
        self._wandb, self._consumed = wandb, start.consumed_samples
        self._facts = facts
        self._enabled = enabled
        self._interval: list[IterationRecord] = []
        self._stack = ExitStack()
        self._progress: ProgressBar | None = None
        self._output_is_lost = False
        self._metrics: MetricsFile | None = None
        self._tensorboard: ScalarFile | None = None
        self._skipped_batches, self._keep_last = skipped_batches, keep_last
        self._skipped_rows: MetricsFile | None = None
        if wandb is not None:
            self._stack.callback(wandb.close)
        if not enabled:
            return
        if skipped_batches is not None and os.path.exists(skipped_batches):
            self._skipped_rows = self._open_rows(skipped_batches, start.iteration, flag="--save")
        if config.metrics_jsonl:
            self._metrics = self._open_rows(
                config.metrics_jsonl, start.iteration, flag="--metrics-jsonl"
            )
        if config.tensorboard_dir:
            self._tensorboard = ScalarFile(config.tensorboard_dir, purge_step=start.iteration + 1)
            self._stack.callback(self._tensorboard.close)
            # A separate file: its steps count samples, the first file's steps count iterations.
            self._by_samples = ScalarFile(
                os.path.join(config.tensorboard_dir, "by_samples"),
                purge_step=start.consumed_samples + 1,
            )
            self._stack.callback(self._by_samples.close)
            self._warn(self._tensorboard.opening, self._by_samples.opening)
        if sys.stdout.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
            )
            self._progress = self._stack.enter_context(
                ProgressBar(*columns, console=Console(soft_wrap=True))
            )
            self._task = self._progress.add_task(
                "training", total=facts.num_iterations, completed=start.iteration, status=""
            )

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        if self._output_is_lost:
            try:
                sys.stdout.flush()
            except OSError:  # else Python's own flush at exit fails, and the status is 120
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def line(self, text: str) -> None:
        """Prints one line."""
        if not self._enabled:
            return
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        """Prints `text`. If standard output is full or closed, warns once on standard error."""
        try:
            print(text, flush=True)
        except OSError as error:
            if not self._output_is_lost:
                self._output_is_lost = True
                with suppress(OSError):
                    print(
                        f"warning: standard output cannot be written ({error.strerror}); "
                        "training goes on",
                        file=sys.stderr,
                        flush=True,
                    )

    def _open_rows(self, path: str, iteration: int, *, flag: str) -> MetricsFile | None:
        """Returns the file, or None with a warning if its disk is full, which ends no run.

        Raises InputError for any other reason why the file cannot be opened.
        """
        try:
            return self._stack.enter_context(
                MetricsFile(path, after_iteration=iteration, flag=flag, keep_last=self._keep_last)
            )
        except InputError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL):
                raise
            self._warn(f"warning: {error}; this run writes no rows to it")
            return None

    def _warn(self, *warnings: str | None) -> None:
        for warning in filter(None, warnings):
            self.line(warning)

    def iteration(self, record: IterationRecord, extras: LogExtras) -> None:
        """Writes one iteration's figures to the files.

        Every --log-interval iterations it also prints Megatron's line, averaged since the last one.
        """
        if not self._enabled:
            return
        if self._metrics is not None:
            self._warn(self._metrics.write(record))
        self._consumed = record.consumed_samples
        if record.iteration % self._config.tensorboard_log_interval == 0:
            self._write_scalars(
                record.iteration,
                scalars_of(record, extras, self._facts, self._config),
                by_samples=BY_SAMPLES,
            )
        if self._progress is not None:
            self._progress.update(
                self._task,
                completed=record.iteration,
                status=(
                    f"loss {record.lm_loss:.4f} | {record.tokens_per_second:,.0f} tokens/s | "
                    f"ETA {eta(record, self._facts, full_batch_ms([record], self._facts))}"
                ),
            )
        self._interval.append(record)
        if (
            record.iteration % self._config.log_interval == 0
            or record.iteration == self._facts.num_iterations
        ):
            self.line(
                iteration_line(
                    self._interval, self._facts, extras, throughput=self._config.log_throughput
                )
            )
            self._interval.clear()

    def summary(self, summary: RunSummary) -> None:
        """Prints how right the predictions were, and writes the figures beside the metrics.

        Nothing is printed or written if nothing was both predicted and measured.
        """
        if not self._enabled or not (text := str(summary)):
            return
        self.line(text)
        if self._metrics is not None and self._config.metrics_jsonl is not None:
            try:
                write_summary(summary, self._config.metrics_jsonl)
            except OSError as error:
                self._warn(f"warning: no summary is written ({error.strerror})")

    def skipped(self, update: SkippedUpdate) -> None:
        """Writes a line in the log and a row in the file about a skipped update.

        An overflow of a float16 run writes the row alone.
        """
        if not self._enabled:
            return
        if update.reason != "overflow":
            self.line(update.line())
        if self._skipped_batches is not None and self._skipped_rows is None:
            self._skipped_rows = self._open_rows(
                self._skipped_batches, update.iteration - 1, flag="--save"
            )
            if self._skipped_rows is None:
                self._skipped_batches = None
        if self._skipped_rows is not None:
            self._warn(self._skipped_rows.write(update))

    def evaluation(self, name: str, iteration: int, result: Evaluation) -> None:
        """Prints the loss and perplexity of a validation or test pass."""
        text = (
            f" {name} loss at iteration {iteration} | lm loss value: {result.loss:.6E} | "
            f"lm loss PPL: {result.perplexity:.6E} | "
        )
        rule = "-" * len(text)
        self.line(f"{rule}\n{text}\n{rule}")
        scalars = {f"lm loss {name}": result.loss}
        if self._config.log_validation_ppl_to_tensorboard:
            scalars[f"lm loss {name} ppl"] = result.perplexity
        self._write_scalars(iteration, scalars, by_samples=scalars)

    def times(self, times: Times | None, iteration: int) -> None:
        """Prints the timers of --timing-log-level, and writes the slowest rank's to TensorBoard."""
        if times is None:
            return
        self.line(str(times))
        if self._config.log_timers_to_tensorboard:
            self._write_scalars(
                iteration, {f"{name}-time": max(ms) / 1000.0 for name, ms in times.ranks.items()}
            )

    def _write_scalars(
        self,
        iteration: int,
        scalars: Mapping[str, float | None],
        *,
        by_samples: Collection[str] = (),
    ) -> None:
        """Writes the scalars that are not None to TensorBoard and W&B.

        by_samples: those that TensorBoard also gets over the consumed samples.
        """
        known = {name: value for name, value in scalars.items() if value is not None}
        if self._wandb is not None:
            self._warn(self._wandb.log({**known, "samples vs steps": self._consumed}, iteration))
        if self._tensorboard is None:
            return
        for name, value in known.items():
            self._warn(self._tensorboard.add_scalar(name, value, iteration))
            if name in by_samples:
                self._warn(self._by_samples.add_scalar(f"{name} vs samples", value, self._consumed))


def scalars_of(
    record: IterationRecord, extras: LogExtras, facts: RunFacts, config: LoggingConfig
) -> dict[str, float | None]:
    """Returns the scalars of an iteration by Megatron's names; None if one is not asked for."""
    full_ms = full_batch_ms([record], facts)
    return {
        "learning-rate": record.learning_rate,
        "decoupled-learning-rate": record.decoupled_learning_rate,
        "batch-size": record.global_batch_size,
        "lm loss": record.lm_loss,
        "loss-scale": record.loss_scale if config.log_loss_scale_to_tensorboard else None,
        "world-size": facts.world_size if config.log_world_size_to_tensorboard else None,
        "grad-norm": record.grad_norm,
        "num-zeros": extras.num_zeros,
        "params-norm": extras.params_norm,
        "throughput": teraflops(full_ms, facts) if config.log_throughput else None,
        "iteration-time": record.iteration_ms / 1000.0
        if config.log_timers_to_tensorboard
        else None,
        "mem-peak-gib": peak_gib(facts.device) if config.log_memory_to_tensorboard else None,
        **(memory_scalars(facts.device) if config.log_memory_to_tensorboard else {}),
        **utilization([record], facts),
    }


def memory_scalars(device: torch.device) -> dict[str, float | None]:
    """Returns Megatron's figures of CUDA's allocator; none on a CPU, which has no allocator."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }
