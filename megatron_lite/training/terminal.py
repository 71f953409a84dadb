"""Standard output of rank 0: lines, and a progress bar if it is a terminal. And the places of the
files of a run.

rich breaks long lines between words on a terminal, and nowhere else: programs read files. Standard
output that is full or closed does not end the run.
"""

import os
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from megatron_lite.config.logging_settings import LOG_FILE
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.messages import print_line
from megatron_lite.parallel.signals import flush_output

BATCH_COLUMNS = 120  # of a file or a pipe
SKIPPED_BATCHES = "skipped_batches.jsonl"


def console() -> Console:
    """Returns what prints on standard output, if it is a terminal."""
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(
        width=None if on_terminal else BATCH_COLUMNS,
        force_terminal=on_terminal,
        markup=False,
        highlight=False,
        emoji=False,
    )


def print_lines(lines: Iterable[str], output: Console) -> None:
    """Prints lines. Raises OSError if standard output is full or closed."""
    for line in lines:
        if output.is_terminal:
            output.print(line)
        else:
            print(line, flush=True)


class Terminal:
    """Prints the lines of one run.

    total, done: the iterations of the run, and those before this start.
    """

    def __init__(self, *, total: int, done: int) -> None:
        self._output_is_lost = False
        self._console = console()
        self.columns = min(self._console.width, BATCH_COLUMNS)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
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
                reason = f"standard output cannot be written ({error.strerror})"
                print_line(f"warning: {reason}; training goes on", sys.stderr)

    def advance(self, iteration: int, status: str) -> None:
        """Moves the progress bar to an iteration."""
        self._bar.update(self._task, completed=iteration, status=status)

    def close(self) -> None:
        """Ends the progress bar, and prevents an error of Python's own flush at its end."""
        self._bar.stop()
        flush_output()


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
