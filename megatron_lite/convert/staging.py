"""A folder that appears complete, or not at all.

A conversion writes into a fresh folder NAME.incomplete-RANDOM beside the target. At the end it
syncs all files and renames the folder. A killed conversion leaves its folder behind, whose lock is
free: the next one removes it. Nothing else is followed, emptied or removed, whatever its name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lite.checkpointing.lock import NO_LOCKS
from megatron_lite.config.checks import InputError
from megatron_lite.data.durable_files import sync

SUFFIX = ".incomplete"
LOCK = "conversion.lock"
MARK = b"megatron_lite: this folder belongs to a conversion, and the next one removes it\n"


def check_absent(target: Path) -> None:
    """Raises InputError if the target exists already and is no empty folder."""
    if target.is_symlink() or (
        target.exists() and not (target.is_dir() and not any(target.iterdir()))
    ):
        raise InputError(
            f"--save {target} exists already, and a conversion replaces nothing: choose another "
            "path, or remove it"
        )


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """Yields the folder to write into, which has the name `target` after the block.

    If the block raises, nothing is left. Raises InputError if the target exists, if another
    conversion writes to it, or if the disk refuses a file.
    """
    check_absent(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(target)
        folder = target.with_name(f"{target.name}{SUFFIX}-{secrets.token_hex(4)}")
        folder.mkdir()
        try:
            with (folder / LOCK).open("xb", buffering=0) as lock:
                # The mark comes after the lock: a marked folder is never seen without it.
                _take(lock.fileno())
                lock.write(MARK)
                yield folder
                check_absent(target)
                (folder / LOCK).unlink()
                for path in (*folder.rglob("*"), folder):
                    sync(path)
                os.rename(folder, target)
                sync(target.parent)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise InputError(f"--save {target} cannot be written: {error.strerror or error}") from error


def _remove_left(target: Path) -> None:
    """Removes what killed conversions to the target have left. Raises InputError if one runs."""
    for path in sorted(target.parent.iterdir()):
        if not path.name.startswith(f"{target.name}{SUFFIX}") or path.is_symlink():
            continue
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # not ours
        try:
            found = os.fstat(lock)
            is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
            if not is_ours or os.read(lock, len(MARK) + 1) != MARK:
                continue
            is_free = _take(lock)
            if is_free is False:
                raise InputError(
                    f"--save {target}: another conversion writes there already: wait for its end, "
                    "or choose another path"
                )
            if is_free:
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _take(descriptor: int) -> bool | None:
    """Returns whether this process now has the lock; None if the file system keeps no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno in NO_LOCKS:
            return None
        raise
    return True
