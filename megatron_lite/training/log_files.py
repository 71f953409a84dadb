"""The files of a log: text, and JSON lines. A log file cannot end a run.

A write that fails raises OSError, and RunLog makes one warning of it (log.py). The file then holds
whole records only.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from megatron_lite.config.checks import InputError
from megatron_lite.config.logging_settings import LOG_FILE
from megatron_lite.config.plain import parse_json
from megatron_lite.config.run import RunConfig

if TYPE_CHECKING:
    from megatron_lite.training.iteration_line import IterationRecord
    from megatron_lite.training.skipped import SkippedUpdate

# Standard output of rank 0: lines, and a progress bar if it is a terminal.
#
# rich breaks long lines between words on a terminal, and nowhere else: programs read files.
# Standard output that is full or closed does not end the run.


BATCH_COLUMNS = 120  # of a file or a pipe


def console() -> Console:
    """Returns what prints on standard output, if it is a terminal."""
    on_terminal = sys.stdout.isatty()
    return Console(
        width=None if on_terminal else BATCH_COLUMNS,
        force_terminal=on_terminal,
        markup=False,
        highlight=False,
        emoji=False,
    )


def print_lines(lines: Iterable[str], output: Console | None = None) -> None:
    """Prints lines, those before a Terminal exists included."""
    output = console() if output is None else output
    for line in lines:
        if output.is_terminal:
            output.print(line)
        else:
            print(line, flush=True)


class Terminal:
    """Prints the lines of one run.

    total, done: the iterations of the run, and those before this start.
    has_bar: whether a progress bar is shown.
    """

    def __init__(self, *, total: int, done: int) -> None:
        self._output_is_lost = False
        self._console = console()
        self.has_bar = self._console.is_terminal
        self.columns = min(self._console.width, BATCH_COLUMNS)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self.has_bar,
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=total, completed=done, status="")

    def line(self, text: str) -> None:
        """Prints lines, above the progress bar.

        If standard output is full or closed, this warns once on standard error.
        """
        try:
            print_lines([text], self._console)
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

    def advance(self, iteration: int, status: str) -> None:
        """Moves the progress bar to an iteration."""
        self._bar.update(self._task, completed=iteration, status=status)

    def close(self) -> None:
        """Ends the progress bar, and prevents an error of Python's own flush at its end."""
        self._bar.stop()
        if self._output_is_lost:
            try:
                sys.stdout.flush()
            except OSError:  # else Python's own flush at exit fails, and the status is 120
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


SKIPPED_BATCHES = "skipped_batches.jsonl"
# A row has these fields only if they are known.
OPTIONAL = (
    *("decoupled_learning_rate", "params_norm", "num_zeros", "attended"),
    *("load_balancing_loss", "z_loss", "expert_imbalance", "expert_rank_imbalance"),
    "activation_bytes_balanced",
)


def log_file_path(config: RunConfig) -> str | None:
    """Returns the path of the log file: --log-file, else train.log in the folder of the run.

    That is the folder of --save, or else of --tensorboard-dir. Without either the run writes no
    log file, and the result is None.
    """
    if config.logging.log_file is not None:
        return config.logging.log_file
    folder = config.checkpoint.save or config.logging.tensorboard_dir
    return None if folder is None else os.path.join(folder, LOG_FILE)


def skipped_batches_path(config: RunConfig) -> str | None:
    """Returns the path of skipped_batches.jsonl, or None without --save."""
    folder = config.checkpoint.save
    return None if folder is None else os.path.join(folder, SKIPPED_BATCHES)


@contextmanager
def _opening(path: Path, name: str) -> Iterator[None]:
    from megatron_lite.checkpointing.directory import check_no_checkpoint

    check_no_checkpoint(path, name)
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{name}: cannot be written ({error.strerror}): choose another file"
        ) from error


class AppendedFile:
    """A file to which whole records are appended without a buffer.

    name: the file's name in messages.
    Raises InputError if the file cannot be opened, or if it is a checkpoint's.
    """

    def __init__(self, path: str, *, name: str) -> None:
        self.name = name
        with _opening(Path(path), name):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
            )

    def write(self, record: str) -> None:
        """Appends a record. If it does not fit, its written part is cut off."""
        status = os.fstat(self._descriptor)
        try:
            rest = memoryview(record.encode(errors="replace"))
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            if stat.S_ISREG(status.st_mode):
                with suppress(OSError):
                    os.ftruncate(self._descriptor, status.st_size)
            raise

    def close(self) -> None:
        """Closes the file. A file system that reports lost last bytes only now is ignored."""
        with suppress(OSError):
            os.close(self._descriptor)


def metrics_file(path: str, iteration: int, *, flag: str = "--metrics-jsonl") -> AppendedFile:
    """Opens a file with one JSON object a line.

    Keeps the rows up to `iteration` and drops later rows, which the run will write again. A resumed
    run therefore leaves the same rows as an uninterrupted one. If rows are dropped, the file as it
    was stays beside it as FILE.previous.
    flag: the option that named the file, for messages.
    """
    target, name = Path(path), f"{flag} {path}"
    with _opening(target, name):
        if (kept := _rows_up_to(target, iteration)) is not None:
            _replace(path, kept)
    return AppendedFile(path, name=name)


def row_text(record: IterationRecord | SkippedUpdate) -> str:
    """Returns a record as JSON. Floats have all their digits; NaN and infinity are null."""
    row = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(record).items()
        if value is not None or key not in OPTIONAL
    }
    return json.dumps(row)


def _replace(path: str, text: str) -> None:
    """Replaces the file's text and keeps the old file beside it.

    A process that is killed meanwhile leaves either the old or the new text whole.
    """
    from megatron_lite.data.durable_files import written_beside

    temporary = f"{path}.tmp"
    with written_beside(f"{path}.previous", name=temporary):
        shutil.copyfile(path, temporary)
    with written_beside(path, name=temporary):
        Path(temporary).write_text(text)


def _rows_up_to(path: Path, iteration: int) -> str | None:
    """Returns the rows to keep, or None if the file can stay as it is.

    A last line that a kill cut short is dropped.
    """
    if not path.is_file():
        return None
    text = path.read_text(errors="replace")
    lines = text.splitlines(keepends=True)
    numbered = [(line, _iteration_of(line)) for line in lines]
    if len(lines) > 1 and all(number is None for _, number in numbered):
        raise InputError(
            f"{path}: holds no metrics of a run, and would be emptied: choose another file"
        )
    kept = "".join(line for line, number in numbered if number is not None and number <= iteration)
    return None if kept == text else kept


def _iteration_of(line: str) -> int | None:
    try:
        value = parse_json(line, longest=None, strict=False)
    except ValueError:
        return None
    number = value.get("iteration") if isinstance(value, dict) else None
    return number if isinstance(number, int) and line.endswith("\n") else None
