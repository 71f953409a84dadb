"""Standard output of rank 0: lines, and a progress bar if it is a terminal.

Standard output that is full or closed does not end the run.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

BATCH_COLUMNS = 120  # of a file or a pipe
LEAST_COLUMNS = 60
LABEL = re.compile(r" {2,4}[a-z]+(?: [a-z]+){0,2} {2,16}(?=\S)")  # of a row of facts


def terminal_columns() -> int:
    """Returns the columns of standard output: those of the terminal, or 120 if it is none."""
    if not sys.stdout.isatty():
        return BATCH_COLUMNS
    return max(LEAST_COLUMNS, shutil.get_terminal_size((BATCH_COLUMNS, 24)).columns)


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines before a Terminal exists: a terminal's are broken between words."""
    on_terminal, columns = sys.stdout.isatty(), terminal_columns()
    for line in (line for text in lines for line in text.split("\n")):
        print(_wrapped(line, columns) if on_terminal else line)
    sys.stdout.flush()


class Terminal:
    """Prints the lines of one run.

    total, done: the iterations of the run, and those before this start.
    """

    def __init__(self, *, total: int, done: int) -> None:
        self._output_is_lost = False
        self._bar: ProgressBar | None = None
        self.columns = terminal_columns()
        if sys.stdout.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
            )
            self._bar = ProgressBar(*columns, console=Console(soft_wrap=True))
            self._bar.start()
            self._task = self._bar.add_task("training", total=total, completed=done, status="")

    def line(self, text: str) -> None:
        """Prints one line, above the progress bar."""
        if self._bar is not None:
            self._bar.console.print(
                "\n".join(_wrapped(line, self.columns) for line in text.split("\n")),
                markup=False,
                highlight=False,
            )
        else:
            self._print(text)

    def advance(self, iteration: int, status: str) -> None:
        """Moves the progress bar to an iteration."""
        if self._bar is not None:
            self._bar.update(self._task, completed=iteration, status=status)

    def close(self) -> None:
        """Ends the progress bar, and prevents an error of Python's own flush at its end."""
        if self._bar is not None:
            self._bar.stop()
        if self._output_is_lost:
            try:
                sys.stdout.flush()
            except OSError:  # else Python's own flush at exit fails, and the status is 120
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

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


def _wrapped(line: str, columns: int) -> str:
    """Returns a line broken between words. Only a terminal breaks lines: programs read files.

    The text of a row such as "  log          train.log" continues below its beginning.
    """
    if len(line) <= columns:
        return line
    label = LABEL.match(line)
    indent = " " * (label.end() if label is not None else 4)
    return textwrap.fill(
        line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
