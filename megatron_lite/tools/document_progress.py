"""The progress of reading documents, as a bar on a terminal or as lines."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator


class DocumentCounter:
    """Counts documents and bytes as they are written. It calls `report` after every change."""

    def __init__(self, report: Callable[[DocumentCounter], None]) -> None:
        self.documents = self.num_bytes = 0
        self._report, self._started = report, time.monotonic()

    def advance(self, documents: int, num_bytes: int) -> None:
        self.documents += documents
        self.num_bytes += num_bytes
        self._report(self)

    def rate(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        return (
            f"{self.documents:,} documents ({self.documents / seconds:,.0f} documents/s, "
            f"{self.num_bytes / 1e6 / seconds:.2f} MB/s)"
        )


@contextlib.contextmanager
def document_progress(total_bytes: int, log_interval: int) -> Iterator[DocumentCounter]:
    """Yields a counter that shows the progress.

    A terminal gets a progress bar, any other output a line after every `log_interval` documents.
    """
    if not sys.stderr.isatty():
        marks = itertools.count(log_interval, log_interval)
        upcoming = [next(marks)]

        def log(progress: DocumentCounter) -> None:
            if progress.documents >= upcoming[0]:
                print(f"processed {progress.rate()}", file=sys.stderr, flush=True)
                upcoming[0] = next(mark for mark in marks if mark > progress.documents)

        yield DocumentCounter(log)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("tokenizing"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("", total=total_bytes, rate="")
        yield DocumentCounter(
            lambda progress: bar.update(task, completed=progress.num_bytes, rate=progress.rate())
        )
