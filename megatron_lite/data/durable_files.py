"""Writes files that survive a power cut: the contents reach the disk before the name does.

`checksum_of` reads them back.
"""

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import open_input, retried

BUFFER_BYTES = 2**20


def sync(path: Path | str) -> None:
    """Returns once the contents of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path | str, content: bytes) -> None:
    """Writes a file whose contents are then on the disk. The caller syncs the folder.

    It is for a file in a folder that gets its name later, when everything in it is on the disk.
    """
    Path(path).write_bytes(content)
    sync(path)


@contextlib.contextmanager
def written_beside(path: str, *, name: str | None = None) -> Iterator[str]:
    """Yields the name under which the block writes a file.

    After the block the file has the name `path`, and both are on the disk. If the block raises,
    nothing is left of the file. An OSError of the block or of the renaming is raised unchanged.

    name: the name to yield; the default contains the number of this process.
    """
    if os.path.exists(path) and not os.path.isfile(path) and name is None:
        raise OSError(errno.EEXIST, "is no regular file, so it is not replaced", path)
    tmp = name or f"{path}.tmp-{os.getpid()}"
    try:
        yield tmp
        sync(tmp)
        os.replace(tmp, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(tmp)
    sync(os.path.dirname(path) or ".")


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Turns an OSError of the block into an InputError that names the file.

    The OSErrors of write and fsync contain no name.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yields a name as `written_beside` does, for a file that the user has named.

    An OSError of the block becomes an InputError with the user's name.
    """
    with naming(path), written_beside(path) as tmp:
        yield tmp


def write_text(path: str, text: str) -> None:
    """Writes a text file that the user has named. It appears complete or not at all."""
    with replacing(path) as tmp:
        Path(tmp).write_text(text, encoding="utf-8")


def check_writable(path: str) -> None:
    """Raises InputError if `write_text` could not write the file, before its text is known."""
    with contextlib.suppress(EOFError), replacing(path) as tmp:
        Path(tmp).touch()
        raise EOFError  # so nothing is replaced


def checksum_of(path: Path | str) -> tuple[int, str]:
    """Returns the size and the SHA-256 of a regular file. Raises as `open_input` does.

    Other threads can run meanwhile: reading and hashing a buffer release Python's global lock.
    """

    def read() -> tuple[int, str]:
        digest = hashlib.sha256()
        with open_input(path) as file:
            while content := file.read(BUFFER_BYTES):
                digest.update(content)
            return file.tell(), digest.hexdigest()

    return retried(path, read)
