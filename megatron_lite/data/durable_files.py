"""Writes files that survive a power cut: the contents reach the disk before the name does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import IO, Any

from megatron_lite.config.checks import InputError


def sync_file(file: IO[Any]) -> None:
    """Returns once all data written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: str) -> None:
    """Returns once the names in a folder (new, renamed, removed) are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def written_beside(path: str, *, name: str | None = None) -> Iterator[str]:
    """Yields the name under which the block writes a file.

    After the block the file has the name `path` and its contents are on the disk. If the block
    raises, nothing is left of the file. The caller syncs the folder. An OSError of the block or of
    the renaming is raised unchanged.

    name: the name to yield; the default contains the number of this process.
    """
    tmp = name or f"{path}.tmp-{os.getpid()}"
    try:
        yield tmp
        with open(tmp, "rb") as file:
            os.fsync(file.fileno())
        os.replace(tmp, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(tmp)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yields a name as `written_beside` does, for a file that the user has named.

    An OSError of the block becomes an InputError with the user's name, because the error of a full
    disk contains no name.
    """
    try:
        with written_beside(path) as tmp:
            yield tmp
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
