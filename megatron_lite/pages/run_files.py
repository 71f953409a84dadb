"""Finds the files that a run has written: metrics, logs, TensorBoard events and checkpoints.

A file of metrics or of skipped updates is recognised by its rows, and a checkpoint by its name.
Each search is bounded, so a folder that is no run costs little time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lite.checkpointing.step_files import STEP_NAME
from megatron_lite.config import plain
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import open_input

DEPTH = 3
MOST_ENTRIES = 20_000
MOST_EVENT_FILES = 200
LONGEST_LINE = 1 << 20  # a row of skipped updates lists its documents
EVENT_FILE = "events.out.tfevents."
BY_SAMPLES = "by_samples"  # event files whose steps count samples (training/logging.py)
SKIPPED_BATCHES = "skipped_batches.jsonl"  # training/skipped.py, which imports torch


@dataclass
class RunFiles:
    """The files of one run.

    metrics: the file of --metrics-jsonl. previous: earlier versions of it, which a restart left.
    skipped: the rows of skipped updates. steps: the folders of the checkpoints, in ascending order.
    """

    name: str
    metrics: Path | None = None
    previous: list[Path] = field(default_factory=list)
    skipped: Path | None = None
    logs: list[Path] = field(default_factory=list)
    events: list[Path] = field(default_factory=list)
    steps: list[Path] = field(default_factory=list)


def find_run(paths: Sequence[str]) -> RunFiles:
    """Returns the files of the run that lie in these folders, or are these files.

    Raises InputError if a path does not exist, if no metrics are found, or if there are metrics of
    several runs.
    """
    found = RunFiles(name=os.path.basename(os.path.abspath(paths[0])))
    metrics: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            for file in _files_under(path):
                _sort_in(file, found, metrics, named=False)
        elif path.exists():
            _sort_in(path, found, metrics, named=True)
        else:
            raise InputError(
                f"{path}: no such file or directory: give the folder of a run, or the file of its "
                "--metrics-jsonl"
            )
    metrics = list(dict.fromkeys(metrics))
    if not metrics:
        raise InputError(
            f"{', '.join(paths)}: no metrics of a run: a run with --metrics-jsonl FILE writes "
            "them, one JSON object with an iteration and a lm_loss per line; give that file, or a "
            "folder that holds it"
        )
    if len(metrics) > 1:
        raise InputError(
            f"{', '.join(paths)}: the metrics of several runs ({', '.join(map(str, metrics[:4]))}"
            f"{', ...' if len(metrics) > 4 else ''}): give one of these files, or the folder of "
            "one run"
        )
    found.metrics = metrics[0]
    if not found.previous:
        found.previous = sorted(metrics[0].parent.glob(f"{_literal(metrics[0].name)}.previous*"))
    found.steps.sort(key=lambda step: step.name)
    found.events = sorted(found.events, key=lambda file: file.name)[-MOST_EVENT_FILES:]
    found.logs.sort()
    return found


def rows_of(path: Path) -> Iterator[dict[str, object] | None]:
    """Yields the JSON objects of a file with one per line, and None for any other line.

    A line longer than LONGEST_LINE yields None once. Raises as `open_input` does.
    """
    for line in lines_of(path):
        try:
            yield None if line is None else plain.parse_object(line)
        except ValueError:
            yield None


def lines_of(path: Path) -> Iterator[bytes | None]:
    """Yields the lines of a file that are not blank; None for one longer than LONGEST_LINE.

    At most one line is in memory. Raises as `open_input` does.
    """
    with open_input(path) as file:
        while line := file.readline(LONGEST_LINE + 1):
            if len(line) <= LONGEST_LINE:
                if line.strip():
                    yield line
                continue
            yield None
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)


def is_metrics_row(row: dict[str, object] | None) -> bool:
    """Returns whether the object is a row of --metrics-jsonl."""
    return row is not None and type(row.get("iteration")) is int and "lm_loss" in row


def _files_under(root: Path) -> Iterator[Path]:
    """Yields the files and the checkpoints under a folder. It follows no links to folders."""
    entries = 0
    folders = [(root, DEPTH)]
    while folders:
        folder, depth = folders.pop()
        try:
            names = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise InputError(f"{folder} cannot be read: {error.strerror or error}") from error
        for entry in names:
            entries += 1
            if entries > MOST_ENTRIES:
                raise InputError(
                    f"{root}: more than {MOST_ENTRIES} files, so not the folder of one run: give "
                    "the file of --metrics-jsonl"
                )
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                if STEP_NAME.fullmatch(entry.name):
                    yield path
                elif depth > 1 and not entry.name.startswith("."):
                    folders.append((path, depth - 1))
            # Names that begin with a point are those of editors, such as links that lock a file.
            elif not entry.is_dir() and not entry.name.startswith("."):
                yield path


def _sort_in(path: Path, found: RunFiles, metrics: list[Path], *, named: bool) -> None:
    """Puts a file where it belongs. named: the user gave this very path."""
    if path.is_dir():
        found.steps.append(path)
    elif path.name == SKIPPED_BATCHES:
        found.skipped = path
    elif path.name.startswith(EVENT_FILE):
        if path.parent.name != BY_SAMPLES:
            found.events.append(path)
    elif ".jsonl.previous" in path.name and not named:
        found.previous.append(path)
    elif path.suffix == ".log":
        found.logs.append(path)
    elif named or path.suffix == ".jsonl":
        if any(is_metrics_row(row) for _, row in zip(range(100), rows_of(path), strict=False)):
            metrics.append(path)
        elif named:
            raise InputError(
                f"{path}: not a metrics file: none of its first 100 lines is a JSON object with "
                "an iteration and a lm_loss"
            )


def _literal(name: str) -> str:
    """Returns a pattern for `glob` that matches exactly this name."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
