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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lite.checkpointing.directory import check_no_checkpoint
from megatron_lite.config.checks import InputError
from megatron_lite.config.plain import parse_json
from megatron_lite.data.durable_files import written_beside

if TYPE_CHECKING:
    from megatron_lite.training.iteration_line import IterationRecord
    from megatron_lite.training.skipped import SkippedUpdate

# A row has these fields only if they are known.
OPTIONAL = (
    *("decoupled_learning_rate", "params_norm", "num_zeros", "attended"),
    *("load_balancing_loss", "z_loss", "expert_imbalance", "expert_rank_imbalance"),
    "activation_bytes_balanced",
)


@contextmanager
def _opening(path: Path, name: str) -> Iterator[None]:
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


def write_json(path: str, values: object) -> None:
    """Writes a JSON file. It is complete or does not appear."""
    with written_beside(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=2)
        file.write("\n")
