"""A log file that cannot end a run.

On a full or broken disk records are lost. One warning reports it, and training continues.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_lite.checkpointing.directory import check_no_checkpoint
from megatron_lite.config.checks import InputError


@contextmanager
def opening(name: str) -> Iterator[None]:
    """Turns an OSError inside the block into an InputError about the file of this name."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{name}: cannot be written ({error.strerror}): choose another file"
        ) from error


class AppendedFile:
    """A file to which whole records are appended without a buffer.

    If a record does not fit, its written part is cut off, so the file holds whole records only. The
    next record is tried again.
    name: the file's name in messages.
    Raises InputError if the file cannot be opened, or if it is a checkpoint's.
    """

    def __init__(self, path: Path, *, name: str) -> None:
        check_no_checkpoint(path, name)
        self._name, self._lost = name, 0
        with opening(name):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
            )

    def append(self, record: bytes, *, what: str) -> str | None:
        """Writes a record. Returns a warning if it is the first record that could not be written.

        what: the record's name in the warning.
        """
        try:
            self._write(record)
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                return (
                    f"warning: {self._name}: {what} could not be written ({error.strerror}); "
                    "training goes on, and later records are tried again without another warning"
                )
        return None

    def close(self) -> None:
        """Closes the file. A file system that reports lost last bytes only now is ignored."""
        with suppress(OSError):
            os.close(self._descriptor)

    def _write(self, record: bytes) -> None:
        status = os.fstat(self._descriptor)
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            if stat.S_ISREG(status.st_mode):
                with suppress(OSError):
                    os.ftruncate(self._descriptor, status.st_size)
            raise
