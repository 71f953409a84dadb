"""A folder that appears complete, or not at all.

A conversion writes into NAME.incomplete beside the target. At the end it syncs all files and
renames the folder. A killed conversion leaves NAME.incomplete behind, without a lock: the next one
removes it and starts again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lite.checkpointing.lock import NO_LOCKS
from megatron_lite.config.checks import InputError
from megatron_lite.data.durable_files import sync_folder

SUFFIX = ".incomplete"
LOCK = "conversion.lock"


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
    folder = target.with_name(target.name + SUFFIX)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        with (folder / LOCK).open("wb") as lock:
            _take(lock.fileno(), target)
            for path in folder.iterdir():  # what a killed conversion has left
                if path.name != LOCK:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            try:
                yield folder
                check_absent(target)
                (folder / LOCK).unlink()
                sync_tree(folder)
                os.rename(folder, target)
                sync_folder(str(target.parent))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except OSError as error:
        raise InputError(f"--save {target} cannot be written: {error.strerror or error}") from error


def sync_tree(folder: Path) -> None:
    """Returns once all files and names below the folder are on the disk."""
    for path in folder.iterdir():
        if path.is_dir():
            sync_tree(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(str(folder))


def _take(descriptor: int, target: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise InputError(
                f"--save {target}: another conversion writes there already: wait for its end, or "
                "choose another path"
            ) from error
        if error.errno not in NO_LOCKS:
            raise
