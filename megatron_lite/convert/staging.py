"""A folder that appears complete, or not at all.

A conversion writes into a fresh folder NAME.incomplete-RANDOM beside the target. At the end it
syncs all files and renames the folder. A killed conversion leaves its folder behind, whose lock is
free: the next one removes it. Nothing else is followed, emptied or removed, whatever its name.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lite.checkpointing.lock import try_lock
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
                try_lock(lock.fileno())
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
        is_named = path.name.startswith(f"{target.name}{SUFFIX}") and not path.is_symlink()
        if not is_named or path.lstat().st_uid != os.getuid():
            continue
        mark = path / LOCK
        if mark.is_symlink() or not mark.is_file():
            continue
        with mark.open("r+b", buffering=0) as lock:
            if lock.read(len(MARK) + 1) != MARK:
                continue  # not ours
            is_free = try_lock(lock.fileno())
            if is_free is False:
                raise InputError(
                    f"--save {target}: another conversion writes there already: wait for its end, "
                    "or choose another path"
                )
            if is_free:
                shutil.rmtree(path, ignore_errors=True)
