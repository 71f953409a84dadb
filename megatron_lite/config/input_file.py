"""Opens files that come from outside. Every tool reads through this module. Standard library only.

A path may name a pipe, which makes a reader wait for ever, a device, or a link to a secret of this
machine. So only regular files are opened, up to a number of bytes. A link is followed only to a
file in its own folder, or to the blobs of the Hugging Face cache that holds the folder.

What a file is raises InputError. What the system refuses (permission, EIO, ESTALE) may pass: it is
tried again, and then raises OSError, which no caller may take for damage.
"""

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR
from json import JSONDecodeError
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from .checks import LARGEST_TEXT, InputError, parse_json, shown

Result = TypeVar("Result")

PAUSES_S = (0.1, 0.5)  # between the tries of a read that the system refuses
MISSING = (ENOENT, ENOTDIR, ELOOP, ENAMETOOLONG)  # no try would find such a file


def regular_path(path: Path | str, *, any_link: bool = False) -> str:
    """Returns the path of a regular file without a link at its end.

    any_link: whether a link may lead out of the file's folder, as links to large data do.
    Raises InputError for a pipe, a device, a folder, and for any other link out of the folder.
    """
    target = os.fspath(path)
    if os.path.islink(target):
        folder, target = os.path.realpath(os.path.dirname(target)), os.path.realpath(target)
        if not any_link and not any(
            target.startswith(f"{home}{os.sep}") for home in _homes(folder)
        ):
            raise InputError(
                f"{path}: is no regular file, but a link out of its folder to {shown(target)}: "
                "give that file itself, or copy it into the folder"
            )
    found = retried(path, lambda: os.stat(target))
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"{path}: is no regular file, and pipes, devices and folders are not read")
    return target


def open_input(path: Path | str, *, any_link: bool = False) -> BinaryIO:
    """Opens a regular file to read. Raises as `regular_path` does."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    target = regular_path(path, any_link=any_link)
    file = os.fdopen(retried(path, lambda: os.open(target, flags)), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise InputError(f"{path}: is no regular file any more")


def input_size(path: Path | str) -> int:
    """Returns the size of a regular file. Raises as `regular_path` does."""
    return os.stat(regular_path(path)).st_size


def read_input(path: Path | str, limit: int) -> bytes:
    """Returns the contents of a regular file. Raises InputError if it has more than `limit` bytes,
    and else as `regular_path` does."""

    def read() -> bytes:
        with open_input(path) as file:
            return file.read(limit + 1)

    data = retried(path, read)
    if len(data) > limit:
        raise InputError(f"{path}: longer than {limit} bytes, and no such file is")
    return data


def read_input_text(path: Path | str, limit: int) -> str:
    """Returns the contents of a text file. Raises InputError if they are not UTF-8."""
    try:
        return read_input(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text in UTF-8 (byte {error.start})") from None


def read_json(path: Path | str, limit: int = LARGEST_TEXT, *, strict: bool = True) -> Any:
    """Returns the value of a JSON file of at most `limit` bytes. Raises ValueError or OSError.

    strict: see `parse_json`.
    """
    try:
        return parse_json(read_input_text(path, limit), strict=strict)
    except JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None


def retried(path: Path | str, action: Callable[[], Result]) -> Result:
    """Returns what the action returns, which reads the file. It is tried again after an OSError.

    Raises InputError if the file is missing, and OSError, with its name, if no try succeeds.
    """
    for pause in (*PAUSES_S, None):
        try:
            return action()
        except OSError as error:
            if error.errno in MISSING:
                raise InputError(f"{path}: cannot be read ({error.strerror})") from error
            if pause is None:
                raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        time.sleep(pause)
    raise AssertionError("the last try returns or raises")


@contextmanager
def crafted(what: str) -> Iterator[None]:
    """Turns any error inside the block but an OSError into an InputError, which names its cause.

    The block reads files from outside, and some files break a rule that nobody has thought of.
    """
    try:
        yield
    except (InputError, OSError):
        raise
    except Exception as error:
        raise InputError(
            f"{what}: cannot be read ({type(error).__name__}: {shown(str(error))}): it is "
            "incomplete or damaged, or of another kind"
        ) from error


def _homes(folder: str) -> Iterator[str]:
    """Yields where links in a folder may lead. A cache has REPO/snapshots/REVISION, REPO/blobs."""
    yield folder
    repository, snapshots = os.path.split(os.path.dirname(folder))
    if snapshots == "snapshots":
        yield os.path.join(repository, "blobs")
