"""The log of a run: the terminal, the log file, JSON lines, TensorBoard and W&B.

                     terminal                             log file
    iteration        a short row                          Megatron's line (iteration_line.py)
    evaluation       one line                             Megatron's three lines
    settings         those that are not the default       the table of all arguments
    other lines      the same in both

The short row is a row of a table that fits the terminal:

    iteration     loss   ms/step   tokens/s      norm        lr       ETA   kept pred./measured
       10/100   4.9146     325.4      6,295      2.79  5.78e-04   0:00:29     14.332/14.332 MiB

The row also has the samples so far, and MFU if the peak is known. `tokens/s` are those of all
ranks, and `norm` is the gradient norm before clipping. A narrow terminal gets the first columns.

Under --log-style megatron the terminal gets what the log file gets. Only rank 0 writes: the log of
any other rank has no file and no terminal, so no caller needs to check its rank. A part of the log
that can no longer be written gives one warning in the others, and the run goes on.
"""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from megatron_lite.config.checks import InputError, printable
from megatron_lite.config.units import ByteUnit, plural, size

from .iteration_line import Interval, IterationRecord, clock, iteration_line, peak_rate, run_facts
from .observe import measures_peak
from .summary import arguments_table, file_lines, ranks_line, step_time_text, summary_of
from .terminal import Terminal, log_file_path, skipped_batches_path

if TYPE_CHECKING:
    from .loop import Trainer
    from .skipped import SkippedUpdate

LAST = 10  # iterations over which the last loss is a mean
HEADING_EVERY = 25
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # faults of a disk, not of a wrong path


class RunLog:
    """The log of one run, whose first line is about MFU.

    printed: the notices that the terminal has already, for the log file.
    Rows and points that an earlier run wrote past the trainer's progress are dropped.
    Raises InputError on rank 0 if a file of the log cannot be opened.
    """

    def __init__(self, trainer: Trainer, printed: Sequence[str]) -> None:
        config, parallel, start = trainer.config, trainer.parallel, trainer.progress
        peak = peak_rate(config.logging, parallel.device, bf16=config.training.precision != "fp32")
        self._facts = facts = run_facts(trainer, peak.flops)
        self._trainer, self._run, self._config, self._start = trainer, config, config.logging, start
        self._shows_peak = measures_peak(config, parallel.device)
        self._began, self._num_rows, self._memory = time.monotonic(), 0, "-"
        self._interval: list[IterationRecord] = []
        self._last = deque[IterationRecord](maxlen=LAST)
        self._validations: list[tuple[float, float, int]] = []
        self._parts: dict[str, Any] = {}  # of log_files.py. None: its disk is full
        self._lost: set[str] = set()
        self._terminal: Terminal | None = None
        if parallel.rank == 0:
            self._terminal = Terminal(total=facts.num_iterations, done=start.iteration)
            self._open()
        started = (
            f"started {datetime.now():%Y-%m-%d %H:%M:%S} on {socket.gethostname()} after iteration "
            f"{start.iteration}"
        )
        for text in (started, arguments_table(config), ranks_line(parallel), *printed):
            self.to_file(text)
        self.line(peak.line())

    def _open(self) -> None:
        """Opens the parts of the log that the flags ask for."""
        run, config, start = self._run, self._config, self._start
        log, skipped = log_file_path(run), skipped_batches_path(run)
        if not (log or config.metrics_jsonl or config.wandb_project):
            return
        files: dict[str, str] = {}
        for name, path in (
            ("the log file", log),
            ("--metrics-jsonl", config.metrics_jsonl),
            ("--memory-timeline", config.memory_timeline),
            ("the list of skipped batches", skipped),
        ):
            # Several may be one device or pipe.
            if path is not None and (os.path.isfile(path) or not os.path.exists(path)):
                other = files.setdefault(os.path.realpath(path), name)
                if other != name:
                    raise InputError(
                        f"{path}: is {other} and {name}: give each of them a file of its own"
                    )
        from . import log_files

        if log is not None:
            flag = "--save" if run.checkpoint.save is not None else "--tensorboard-dir"
            flag = flag if config.log_file is None else "--log-file"
            self._add("log", log_files.AppendedFile, log, f"{flag}: the log file {log}")
        if skipped is not None and os.path.exists(skipped):
            self._add("skipped", log_files.metrics_file, skipped, start.iteration, "--save")
        if config.metrics_jsonl is not None:
            self._add("metrics", log_files.metrics_file, config.metrics_jsonl, start.iteration)
        if config.tensorboard_dir is not None:
            self._add("tensorboard", log_files.TensorBoard, config.tensorboard_dir, start)
        if config.wandb_project:
            self._add("wandb", log_files.Wandb, run)

    def _add(self, key: str, opened: Callable[..., object], *args: object) -> None:
        """Opens a part of the log. If its disk is full, a warning says so.

        Raises InputError for any other reason why it cannot be opened.
        """
        self._parts[key] = None
        try:
            self._parts[key] = opened(*args)
        except InputError as error:
            if getattr(error.__cause__, "errno", None) not in FULL:
                raise
            self.line(f"warning: {error}; this run does not write it")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            # The terminal gets the error from the program, on standard error.
            self.to_file(printable(f"error: {str(error) or type(error).__name__}"))
        for part in (*self._parts.values(), self._terminal):
            if part is not None:
                with suppress(Exception):  # whatever a package raises is no reason to fail
                    part.close()

    def attempt(self, name: str, what: str, write: Callable[..., None], *args: object) -> None:
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

    def _write(self, key: str, what: str, *args: object) -> None:
        if (part := self._parts.get(key)) is not None:
            self.attempt(part.name, what, part.write, *args)

    def line(self, text: str) -> None:
        """Prints one line, and writes it to the log file."""
        text = printable(text)
        self.detail(text, short=text)

    def to_file(self, text: str) -> None:
        """Writes lines to the log file."""
        self._write("log", "a line", text)

    def detail(self, text: str, *, short: str | None = None) -> None:
        """Writes lines to the log file. The terminal gets them under --log-style megatron.

        short: what the terminal gets instead in the short style; None: nothing.
        """
        shown = text if self._config.log_style == "megatron" else short
        if self._terminal is not None and shown is not None:
            self._terminal.line(shown)
        self.to_file(text)

    def iteration(self, record: IterationRecord) -> None:
        """Writes one iteration's figures to the files.

        Every --log-interval iterations it also prints a line, averaged since the last one.
        """
        if self._terminal is None:
            return
        config, facts = self._config, self._facts
        self._last.append(record)
        self._interval.append(record)
        if "metrics" in self._parts:
            self._write("metrics", f"iteration {record.iteration}", record)
        draws = config.tensorboard_dir is not None or config.wandb_project
        if draws and record.iteration % config.tensorboard_log_interval == 0:
            from .log_files import scalars_of

            scalars = scalars_of(Interval([record], facts), facts, config)
            self._write_scalars(record.iteration, scalars)
        speed = f"{record.tokens_per_second:,.0f} tokens/s"
        self._terminal.advance(record.iteration, f"loss {record.lm_loss:.4f}, {speed}")
        if record.iteration == facts.num_iterations or record.iteration % config.log_interval == 0:
            interval, self._interval = Interval(self._interval, facts), []
            if config.log_style == "megatron" or "log" in self._parts:
                self.detail(iteration_line(interval, facts, throughput=config.log_throughput))
            if config.log_style != "megatron":
                self._terminal.line(self._row(interval, self._terminal.columns))

    def _row(self, interval: Interval, columns: int) -> str:
        """Returns the row of these iterations, of at most `columns` columns.

        The headings of all columns come before every 25th row. A line after the row counts skipped
        updates, if there were any.
        """
        last, share = interval.last, interval.utilization.get("MFU")
        end, what = self._facts.num_iterations, "kept"
        both = last.activation_bytes_predicted, last.activation_bytes_measured
        if self._shows_peak:
            what, both = "peak", (self._trainer.peak or (None, None))[:2]
        predicted, measured = both
        if self._memory == "-" and predicted is not None and measured is not None:
            unit = ByteUnit.of(max(predicted, measured))
            self._memory = f"{unit.number(predicted)}/{unit.number(measured)} {unit.name}"
        names = row = ""
        for name, width, value in (
            ("iteration", max(9, 2 * len(str(end)) + 1), f"{last.iteration}/{end}"),
            ("loss", 9, f"{interval.loss:.4f}"),
            ("ms/step", 10, f"{interval.ms:,.1f}"),
            ("tokens/s", 11, f"{interval.tokens_per_second:,.0f}"),
            ("MFU", 7, None if share is None else f"{share:.1f}%"),
            ("norm", 10, f"{last.grad_norm:.3g}"),
            ("lr", 10, f"{last.learning_rate:.2e}"),
            ("ETA", 10, interval.eta),
            (f"{what} pred./measured", 22, self._memory),
            ("samples", 12, str(last.consumed_samples)),
        ):
            if value is None:
                continue
            width = max(width, len(value) + 2) if names else width
            if len(names) + width > columns:
                break
            names, row = names + f"{name:>{width}}", row + f"{value:>{width}}"
        if self._num_rows % HEADING_EVERY == 0:
            row = f"{names}\n{row}"
        self._num_rows += 1
        if interval.skipped or interval.nan:
            row += (
                f"\n  {plural(interval.skipped, 'skipped update')}, "
                f"{plural(interval.nan, 'loss', 'losses')} not finite since the last row"
            )
        return row

    def summary(self, *, finished: bool) -> None:
        """Prints the lines at the end of the run. Writes the predictions beside the metrics.

        The file is written only if something was both predicted and measured.
        finished: whether the run has reached its end.
        """
        trainer, progress = self._trainer, self._trainer.progress
        summary = summary_of(trainer)
        step_time = step_time_text(summary)
        self.line(
            f"{'finished' if finished else 'stopped'} at iteration {progress.iteration} of "
            f"{trainer.num_iterations} after {clock(time.monotonic() - self._began)}, with "
            "evaluations and saves"
        )
        totals = self._totals(step_time) if self._last else ()  # none without an iteration
        for label, text in (*totals, *file_lines(self._run, progress)):
            self.line(f"  {label:13}{text}")
        compares = trainer.peak is not None or step_time
        if self._parts.get("metrics") is not None and compares:
            from megatron_lite.data.durable_files import write_text

            path = f"{self._config.metrics_jsonl}.summary.json"
            text = json.dumps(summary, indent=2)
            self.attempt(path, "the summary", write_text, path, f"{text}\n")

    def _totals(self, step_time: str) -> Iterator[tuple[str, str]]:
        """Yields the names and the texts of the totals of a run that has trained.

        step_time: its text.
        """
        trainer, config, facts, last = self._trainer, self._run, self._facts, self._last
        progress, start, seconds = trainer.progress, self._start, sum(trainer.seconds)
        samples = progress.consumed_samples - start.consumed_samples
        skipped = progress.skipped_iterations - start.skipped_iterations
        tokens, share = samples * facts.tokens // facts.batch_size, ""
        if facts.peak_flops is not None:
            flops = Interval(last, facts).flops * samples / facts.batch_size
            share = f", MFU {100.0 * flops / (facts.peak_flops * facts.world_size * seconds):.1f}%"
        yield (
            "trained",
            f"{samples:,} samples, {tokens:,} tokens in {clock(seconds)}: "
            f"{tokens / seconds:,.0f} tokens/s{share}",
        )
        yield (
            "loss",
            f"{Interval(last, facts).loss:.4f} (mean of the last {plural(len(last), 'iteration')})",
        )
        if self._validations:
            loss, perplexity, iteration = min(self._validations)
            yield (
                "validation",
                f"best loss {loss:.4f} (perplexity {perplexity:.3f}) at iteration {iteration}",
            )
        kept = last[-1]
        predicted, measured = kept.activation_bytes_predicted, kept.activation_bytes_measured
        if measured is not None:
            told = "as predicted to the byte"
            if predicted != measured:
                told = f"{size(predicted or 0)} were predicted"
            balanced = kept.activation_bytes_balanced
            if balanced is not None:
                told += f"; {size(balanced)} if routers chose every expert equally often"
            yield "kept", f"{size(measured)} for backward by a micro-batch, {told}"
        if trainer.peak is not None:
            yield "peak", str(trainer.peak)
        elif not config.compiles_layers:
            by_flag = "" if config.logging.log_peak_memory else " (--log-peak-memory measures it)"
            yield "peak", f"not measured{by_flag}"
        if step_time:
            yield "step time", step_time
        text = plural(skipped, "update") if skipped else "no updates"
        if skipped and (listed := skipped_batches_path(config)) is not None:
            text += f", listed in {listed}"
        yield "skipped", text

    def skipped(self, update: SkippedUpdate) -> None:
        """Writes a line in the log and a row in the file about a skipped update.

        An overflow of a float16 run writes the row alone. The first row creates the file.
        """
        if update.reason != "overflow":
            self.line(update.line())
        path = skipped_batches_path(self._run)
        if path is not None and self._terminal is not None and "skipped" not in self._parts:
            from .log_files import metrics_file

            self._add("skipped", metrics_file, path, update.iteration - 1, "--save")
        self._write("skipped", f"iteration {update.iteration}", update)

    def evaluation(self, name: str, iteration: int, loss: float) -> None:
        """Prints the loss and perplexity of a validation or test pass."""
        perplexity = math.exp(loss) if loss < 700.0 else math.inf
        if name == "validation" and math.isfinite(loss):
            self._validations.append((loss, perplexity, iteration))
        text = (
            f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} | "
            f"lm loss PPL: {perplexity:.6E} | "
        )
        rule = "-" * len(text)
        self.detail(
            f"{rule}\n{text}\n{rule}",
            short=f"{name} loss at iteration {iteration}: {loss:.4f} (perplexity {perplexity:.3f})",
        )
        scalars = {f"lm loss {name}": loss}
        if self._config.log_validation_ppl_to_tensorboard:
            scalars[f"lm loss {name} ppl"] = perplexity
        self._write_scalars(iteration, scalars)

    def times(self, times: Mapping[str, Sequence[float]], iteration: int) -> None:
        """Prints the timers of --timing-log-level, and writes the slowest rank's to TensorBoard.

        times: by the name of the timer, the milliseconds of each rank.
        """
        from .profiler import times_text

        if times:
            self.line(times_text(times, self._config.timing_log_option))
        if self._config.log_timers_to_tensorboard:
            slowest = {f"{name}-time": max(ms) / 1000.0 for name, ms in times.items()}
            self._write_scalars(iteration, slowest)

    def _write_scalars(self, iteration: int, scalars: Mapping[str, float | None]) -> None:
        known = {name: value for name, value in scalars.items() if value is not None}
        consumed = (self._last[-1] if self._last else self._start).consumed_samples
        for key in ("tensorboard", "wandb"):
            self._write(key, f"iteration {iteration}", iteration, consumed, known)
