"""The log of a run: the terminal, the log file, JSON lines, TensorBoard and W&B.

                     terminal                             log file
    iteration        a short row                          Megatron's line (iteration_line.py)
    evaluation       one line                             Megatron's three lines
    settings         those that are not the default       the table of all arguments
    other lines      the same in both

Under --log-style megatron the terminal gets what the log file gets. Only rank 0 writes: the log of
any other rank has no file and no terminal, so no caller needs to check its rank. A part of the log
that can no longer be written gives one warning in the others, and the run goes on.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from megatron_lite.checkpointing.metadata import Progress
from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.checks import InputError
from megatron_lite.config.invocation import BY_SCRIPT, Invocation
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import plural
from megatron_lite.parallel.messages import told_if_slow
from megatron_lite.parallel.state import ParallelState
from megatron_lite.training.iteration_line import (
    Evaluation,
    Interval,
    IterationRecord,
    iteration_line,
    short_row,
)
from megatron_lite.training.log_files import AppendedFile, MetricsFile, log_file_path
from megatron_lite.training.peak_memory import PeakMemory
from megatron_lite.training.run_facts import RunFacts, peak_rate, run_facts
from megatron_lite.training.scalars import BY_SAMPLES, Points, TensorBoard, Wandb, scalars_of
from megatron_lite.training.skipped import SkippedUpdate, skipped_batches_path
from megatron_lite.training.start_text import arguments_table, ranks_line
from megatron_lite.training.summary import RunSummary, RunTotals
from megatron_lite.training.terminal import Terminal

if TYPE_CHECKING:
    from megatron_lite.training.timers import Times

Sink = TypeVar("Sink", AppendedFile, MetricsFile, TensorBoard, Wandb)
HEADING_EVERY = 25
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # faults of a disk, not of a wrong path


def open_log(
    config: RunConfig,
    parallel: ParallelState,
    batches: BatchSchedule,
    progress: Progress,
    *,
    num_iterations: int,
    shows_peak: bool,
    invocation: Invocation = BY_SCRIPT,
) -> RunLog:
    """Returns the log of a run that goes on from `progress`. Its first line is about MFU.

    shows_peak: whether the run measures the peak of a step.
    invocation: how a command line started the run. The log file gets the notices that were printed.
    Raises InputError on rank 0 if a file of the log cannot be opened.
    """
    peak = peak_rate(config.logging, parallel.device, bf16=config.training.precision != "fp32")
    facts = run_facts(
        config,
        batches,
        progress,
        num_iterations=num_iterations,
        world_size=parallel.world_size,
        device=parallel.device,
        peak=peak,
    )
    log = RunLog(
        config,
        facts,
        enabled=parallel.rank == 0,
        start=progress,
        program=invocation.program,
        shows_peak=shows_peak,
    )
    started = f"started {datetime.now():%Y-%m-%d %H:%M:%S} on {socket.gethostname()}"
    for text in (started, arguments_table(config), ranks_line(parallel), *invocation.printed):
        log.to_file(text)
    log.line(peak.line())
    return log


class RunLog:
    """The log of one run.

    start: the progress at the start. Rows and points that an earlier run wrote past it are dropped.
    program: the name of the program that the user started.
    shows_peak: whether the run measures the peak of a step, so that the rows show it.
    """

    def __init__(
        self,
        config: RunConfig,
        facts: RunFacts,
        *,
        enabled: bool,
        start: Progress,
        program: str = BY_SCRIPT.program,
        shows_peak: bool = False,
    ) -> None:
        self._run, self._config, self._facts = config, config.logging, facts
        self._enabled, self._start, self._shows_peak = enabled, start, shows_peak
        self._consumed, self._num_rows = start.consumed_samples, 0
        self._interval: list[IterationRecord] = []
        self._totals = RunTotals(facts, program)
        self._lost: set[str] = set()
        self._stack = ExitStack()
        self._terminal: Terminal | None = None
        self._file: AppendedFile | None = None
        self._metrics: MetricsFile | None = None
        self._skipped_rows: MetricsFile | None = None
        self._skipped_is_open = False
        self._scalars: list[TensorBoard | Wandb] = []
        if enabled:
            self._open()

    def _open(self) -> None:
        config, start = self._config, self._start
        self._terminal = Terminal(total=self._facts.num_iterations, done=start.iteration)
        self._stack.callback(self._terminal.close)
        if (file := log_file_path(self._run)) is not None:
            flag = "--save" if self._run.checkpoint.save is not None else "--tensorboard-dir"
            flag = flag if config.log_file is None else "--log-file"
            name = f"{flag}: the log file {file}"
            self._file = self._opened(lambda: AppendedFile(Path(file), name=name))
        skipped = skipped_batches_path(self._run)
        if skipped is not None and os.path.exists(skipped):
            self._open_skipped(start.iteration)
        if (path := config.metrics_jsonl) is not None:
            self._metrics = self._opened(lambda: MetricsFile(path, after_iteration=start.iteration))
        if (folder := config.tensorboard_dir) is not None:
            self._scalars += filter(None, [self._opened(lambda: TensorBoard(folder, start))])
        if config.wandb_project:
            self._scalars += filter(None, [self._opened(lambda: Wandb(self._run))])

    def _open_skipped(self, iteration: int) -> None:
        path, self._skipped_is_open = skipped_batches_path(self._run), True
        if path is not None:
            self._skipped_rows = self._opened(
                lambda: MetricsFile(path, after_iteration=iteration, flag="--save")
            )

    def _opened(self, open_: Callable[[], Sink]) -> Sink | None:
        """Returns a file that is closed with the log, or None with a warning if its disk is full.

        Raises InputError for any other reason why the file cannot be opened.
        """
        try:
            sink = open_()
        except InputError as error:
            if getattr(error.__cause__, "errno", None) not in FULL:
                raise
            self.line(f"warning: {error}; this run does not write it")
            return None
        self._stack.callback(sink.close)
        return sink

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # The terminal gets the error from the program, on standard error.
            self.to_file(f"error: {error}" if str(error) else f"error: {type(error).__name__}")
        self._stack.close()

    def _try(self, name: str, what: str, write: Callable[..., None], *args: object) -> None:
        """Writes to one part of the log. The first fault of each part is a warning in the others.

        A package may raise any error.
        """
        try:
            write(*args)
        except Exception as error:
            if name not in self._lost:
                self._lost.add(name)
                reason = getattr(error, "strerror", None) or error
                self.line(
                    f"warning: {name}: {what} could not be written ({reason}); training goes on, "
                    "and later ones are tried again without another warning"
                )

    def line(self, text: str) -> None:
        """Prints one line, and writes it to the log file."""
        self.to_terminal(text)
        self.to_file(text)

    def to_terminal(self, text: str) -> None:
        """Prints lines."""
        if self._terminal is not None:
            self._terminal.line(text)

    def to_file(self, text: str) -> None:
        """Writes lines to the log file."""
        if self._file is not None:
            self._try(self._file.name, "a line", self._file.write, f"{text}\n")

    def detail(self, text: str, *, short: str | None = None) -> None:
        """Writes lines to the log file. The terminal gets them under --log-style megatron.

        short: what the terminal gets instead in the short style; None: nothing.
        """
        shown = text if self._config.log_style == "megatron" else short
        if shown is not None:
            self.to_terminal(shown)
        self.to_file(text)

    def slow(self, what: str) -> AbstractContextManager[None]:
        """Returns a context that tells of work that takes more than a few seconds."""
        return told_if_slow(what, self.line) if self._enabled else nullcontext()

    def iteration(self, record: IterationRecord, *, peak: PeakMemory | None = None) -> None:
        """Writes one iteration's figures to the files.

        Every --log-interval iterations it also prints a line, averaged since the last one.
        peak: the peak of a step, if it has been measured.
        """
        if self._terminal is None:
            return
        config, facts = self._config, self._facts
        one = Interval([record], facts)
        self._totals.add(record)
        self._consumed = record.consumed_samples
        if self._metrics is not None:
            what = f"iteration {record.iteration}"
            self._try(self._metrics.name, what, self._metrics.write_row, record)
        if self._scalars and record.iteration % config.tensorboard_log_interval == 0:
            self._write_scalars(record.iteration, scalars_of(one, facts, config), BY_SAMPLES)
        self._terminal.advance(
            record.iteration,
            f"loss {record.lm_loss:.4f}, {record.tokens_per_second:,.0f} tokens/s, ETA {one.eta}",
        )
        self._interval.append(record)
        is_last = record.iteration == facts.num_iterations
        if is_last or record.iteration % config.log_interval == 0:
            interval = Interval(self._interval, facts)
            self._interval.clear()
            line = iteration_line(interval, facts, throughput=config.log_throughput)
            self.detail(line, short=self._short(interval, peak))

    def _short(self, interval: Interval, peak: PeakMemory | None) -> str:
        """Returns the row of the terminal, below a heading from time to time.

        A line after the row counts skipped updates, if there were any.
        """
        assert self._terminal is not None
        columns, shows_peak = self._terminal.columns, self._shows_peak
        heading, row = short_row(
            interval, self._facts, peak, columns=columns, shows_peak=shows_peak
        )
        text = row if self._num_rows % HEADING_EVERY else f"{heading}\n{row}"
        self._num_rows += 1
        if interval.skipped or interval.nan:
            text += (
                f"\n  {plural(interval.skipped, 'skipped update')}, "
                f"{plural(interval.nan, 'loss', 'losses')} not finite since the last row"
            )
        return text

    def summary(self, summary: RunSummary, progress: Progress, *, finished: bool) -> None:
        """Prints the lines at the end of the run. Writes the predictions beside the metrics.

        The file is written only if something was both predicted and measured.
        finished: whether the run has reached its end.
        """
        for line in self._totals.lines(self._run, progress, summary, finished=finished):
            self.line(line)
        if self._metrics is not None and list(summary.parts()):
            name = f"{self._config.metrics_jsonl}.summary.json"
            self._try(name, "the summary", summary.write, self._config.metrics_jsonl)

    def skipped(self, update: SkippedUpdate) -> None:
        """Writes a line in the log and a row in the file about a skipped update.

        An overflow of a float16 run writes the row alone. The first row creates the file.
        """
        if update.reason != "overflow":
            self.line(update.line())
        if self._enabled and not self._skipped_is_open:
            self._open_skipped(update.iteration - 1)
        if self._skipped_rows is not None:
            what = f"iteration {update.iteration}"
            self._try(self._skipped_rows.name, what, self._skipped_rows.write_row, update)

    def evaluation(self, name: str, iteration: int, result: Evaluation) -> None:
        """Prints the loss and perplexity of a validation or test pass."""
        if name == "validation":
            self._totals.evaluated(iteration, result)
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
        self._write_scalars(iteration, scalars, scalars)

    def times(self, times: Times | None, iteration: int) -> None:
        """Prints the timers of --timing-log-level, and writes the slowest rank's to TensorBoard."""
        if times is None:
            return
        self.line(str(times))
        if self._config.log_timers_to_tensorboard:
            slowest = {f"{name}-time": max(ms) / 1000.0 for name, ms in times.ranks.items()}
            self._write_scalars(iteration, slowest)

    def _write_scalars(
        self, iteration: int, scalars: Mapping[str, float | None], by_samples: Collection[str] = ()
    ) -> None:
        known = {name: value for name, value in scalars.items() if value is not None}
        points = Points(iteration, self._consumed, known, by_samples)
        for sink in self._scalars:
            self._try(sink.name, f"iteration {iteration}", sink.write, points)
