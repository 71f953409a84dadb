"""The log of a run: the terminal, the log file, JSON lines, TensorBoard and W&B.

                     terminal                             log file
    iteration        a short row                          Megatron's line (iteration_line.py)
    evaluation       one line                             Megatron's three lines
    settings         those that are not the default       the table of all arguments
    other lines      the same in both

Under --log-style megatron the terminal gets what the log file gets. Only rank 0 writes. The other
ranks hold a RunLog that writes nothing, so no caller needs to check its rank.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from megatron_lite.checkpointing.metadata import Progress
from megatron_lite.config.checks import InputError
from megatron_lite.config.invocation import SCRIPT
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import plural
from megatron_lite.training.appended import AppendedFile
from megatron_lite.training.evaluate import Evaluation
from megatron_lite.training.iteration_line import (
    LogExtras,
    RunFacts,
    eta,
    full_batch_ms,
    iteration_line,
    short_row,
)
from megatron_lite.training.log_file import log_file_path
from megatron_lite.training.metrics import IterationRecord, MetricsFile
from megatron_lite.training.peak_memory import PeakMemory
from megatron_lite.training.run_summary import RunSummary, write_summary
from megatron_lite.training.run_totals import RunTotals
from megatron_lite.training.scalars import BY_SAMPLES, Scalars, scalars_of
from megatron_lite.training.skipped import SkippedUpdate, skipped_batches_path
from megatron_lite.training.slow_work import told_if_slow
from megatron_lite.training.terminal import Terminal
from megatron_lite.training.timers import Times

File = TypeVar("File", AppendedFile, MetricsFile, Scalars)
HEADING_EVERY = 25
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # faults of a disk, not of a wrong path


class RunLog:
    """The log of one run. A log that can no longer be written does not end the run.

    start: the progress at the start. Rows and points that an earlier run wrote past it are dropped.
    program: the name of the program that the user started.
    shows_peak: whether the run measures the peak of a step, so that the rows show it.
    opening: lines with which the log file begins.
    """

    def __init__(
        self,
        config: RunConfig,
        facts: RunFacts,
        *,
        enabled: bool,
        start: Progress,
        program: str = SCRIPT,
        shows_peak: bool = False,
        opening: Sequence[str] = (),
    ) -> None:
        self._run, self._config = config, config.logging
        self._facts, self._enabled, self._start = facts, enabled, start
        self._consumed = start.consumed_samples
        self._interval: list[IterationRecord] = []
        self._totals = RunTotals(facts, program)
        self._stack = ExitStack()
        self._metrics: MetricsFile | None = None
        self._file: AppendedFile | None = None
        self._skipped_batches = skipped_batches_path(config)
        self._skipped_rows: MetricsFile | None = None
        if not enabled:
            return
        self._terminal = Terminal(total=facts.num_iterations, done=start.iteration)
        self._stack.callback(self._terminal.close)
        self._shows_peak, self._num_rows = shows_peak, 0
        if (name := log_file_path(config)) is not None:
            what = f"{name.flag}: the log file {name.path}"
            self._file = self._opened(lambda: AppendedFile(Path(name.path), name=what))
        for text in opening:
            self._write(text)
        if self._skipped_batches is not None and os.path.exists(self._skipped_batches):
            self._skipped_rows = self._open_rows(self._skipped_batches, start.iteration, "--save")
        if self._config.metrics_jsonl:
            self._metrics = self._open_rows(
                self._config.metrics_jsonl, start.iteration, "--metrics-jsonl"
            )
        self._scalars = self._opened(lambda: Scalars(config, start))

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._file is not None:
            # The terminal gets the error from the program, on standard error.
            self._write(f"error: {error}" if str(error) else f"error: {type(error).__name__}")
        self._stack.close()

    def line(self, text: str) -> None:
        """Prints one line, and writes it to the log file."""
        if self._enabled:
            self._terminal.line(text)
            self._write(text)

    def detail(self, text: str, *, short: str | None = None) -> None:
        """Writes lines to the log file. The terminal gets them under --log-style megatron.

        short: what the terminal gets instead in the short style; None: nothing.
        """
        if not self._enabled:
            return
        shown = text if self._config.log_style == "megatron" else short
        if shown is not None:
            self._terminal.line(shown)
        self._write(text)

    def slow(self, what: str) -> AbstractContextManager[None]:
        """Returns a context that tells of work that takes more than a few seconds."""
        return told_if_slow(what, self.line) if self._enabled else nullcontext()

    def iteration(
        self, record: IterationRecord, extras: LogExtras, *, peak: PeakMemory | None = None
    ) -> None:
        """Writes one iteration's figures to the files.

        Every --log-interval iterations it also prints a line, averaged since the last one.
        peak: the peak of a step, if it has been measured.
        """
        if not self._enabled:
            return
        self._totals.add(record)
        if self._metrics is not None:
            self._warn(self._metrics.write(record))
        self._consumed = record.consumed_samples
        if record.iteration % self._config.tensorboard_log_interval == 0:
            self._write_scalars(
                record.iteration,
                scalars_of(record, extras, self._facts, self._config),
                by_samples=BY_SAMPLES,
            )
        self._terminal.advance(
            record.iteration,
            f"loss {record.lm_loss:.4f}, {record.tokens_per_second:,.0f} tokens/s, "
            f"ETA {eta(record, self._facts, full_batch_ms([record], self._facts))}",
        )
        self._interval.append(record)
        if (
            record.iteration % self._config.log_interval == 0
            or record.iteration == self._facts.num_iterations
        ):
            self.detail(
                iteration_line(
                    self._interval, self._facts, extras, throughput=self._config.log_throughput
                ),
                short=self._short(peak),
            )
            self._interval.clear()

    def _short(self, peak: PeakMemory | None) -> str:
        """Returns the row of the terminal, below a heading from time to time.

        A line after the row counts skipped updates, if there were any.
        """
        heading, row = short_row(
            self._interval,
            self._facts,
            peak,
            columns=self._terminal.columns,
            shows_peak=self._shows_peak,
        )
        lines = [row] if self._num_rows % HEADING_EVERY else [heading, row]
        self._num_rows += 1
        skipped, nan = (
            sum(getattr(record, name) for record in self._interval) for name in ("skipped", "nan")
        )
        if skipped or nan:
            lines.append(
                f"  {plural(skipped, 'skipped update')}, {plural(nan, 'loss', 'losses')} "
                "not finite since the last row"
            )
        return "\n".join(lines)

    def summary(self, summary: RunSummary, progress: Progress, *, finished: bool) -> None:
        """Prints the lines at the end of the run. Writes the predictions beside the metrics.

        The file is written only if something was both predicted and measured.
        finished: whether the run has reached its end.
        """
        if not self._enabled:
            return
        for line in self._totals.lines(self._run, progress, summary, finished=finished):
            self.line(line)
        if self._config.metrics_jsonl and self._metrics is not None and list(summary.parts()):
            try:
                write_summary(summary, self._config.metrics_jsonl)
            except OSError as error:
                self._warn(f"warning: no summary is written ({error.strerror})")

    def skipped(self, update: SkippedUpdate) -> None:
        """Writes a line in the log and a row in the file about a skipped update.

        An overflow of a float16 run writes the row alone. The first row creates the file.
        """
        if not self._enabled:
            return
        if update.reason != "overflow":
            self.line(update.line())
        if self._skipped_batches is not None and self._skipped_rows is None:
            self._skipped_rows = self._open_rows(
                self._skipped_batches, update.iteration - 1, "--save"
            )
            if self._skipped_rows is None:
                self._skipped_batches = None
        if self._skipped_rows is not None:
            self._warn(self._skipped_rows.write(update))

    def evaluation(self, name: str, iteration: int, result: Evaluation) -> None:
        """Prints the loss and perplexity of a validation or test pass."""
        self._totals.evaluated(name, iteration, result)
        text = (
            f" {name} loss at iteration {iteration} | lm loss value: {result.loss:.6E} | "
            f"lm loss PPL: {result.perplexity:.6E} | "
        )
        rule = "-" * len(text)
        self.detail(
            f"{rule}\n{text}\n{rule}",
            short=f"{name} loss at iteration {iteration}: {result.loss:.4f} "
            f"(perplexity {result.perplexity:.3f})",
        )
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

    def _open_rows(self, path: str, iteration: int, flag: str) -> MetricsFile | None:
        keep_last = self._run.checkpoint.save_keep_last
        return self._opened(
            lambda: MetricsFile(path, after_iteration=iteration, flag=flag, keep_last=keep_last)
        )

    def _opened(self, open_: Callable[[], File]) -> File | None:
        """Returns a file that is closed with the log, or None with a warning if its disk is full.

        Raises InputError for any other reason why the file cannot be opened.
        """
        try:
            file = open_()
        except InputError as error:
            cause = error.__cause__
            if not (isinstance(cause, OSError) and cause.errno in FULL):
                raise
            self.line(f"warning: {error}; this run does not write it")
            return None
        self._stack.callback(file.close)
        return file

    def _write(self, text: str) -> None:
        """Writes lines to the log file. Its own warning goes to the terminal alone."""
        if self._file is not None:
            data = f"{text}\n".encode(errors="replace")
            if (warning := self._file.append(data, what="a line")) is not None:
                self._terminal.line(warning)

    def _warn(self, *warnings: str | None) -> None:
        for warning in filter(None, warnings):
            self.line(warning)

    def _write_scalars(
        self,
        iteration: int,
        scalars: Mapping[str, float | None],
        *,
        by_samples: Collection[str] = (),
    ) -> None:
        if self._enabled and self._scalars is not None:
            self._warn(
                *self._scalars.write(
                    scalars, iteration=iteration, consumed=self._consumed, by_samples=by_samples
                )
            )
