"""Changes the directory of --save: each change is one rename, right after a check of the lock.

A hanging file server can hold a process between the check and the rename. Meanwhile a later start
can take the lock and go on. Three rules keep such a stale start from doing harm:

1. A start publishes a step or the pointer only by renaming a folder or file whose name contains
   its token. When the later start takes the lock, it removes or renames all of these
   (retention.py), before it chooses a step. A rename that comes late finds nothing to rename.
2. A start that takes a step's name away (to replace it, set it aside or delete it) checks the lock
   again before it deletes anything. If the lock is lost, the step gets its name back.
3. Each manifest holds the number of the start that saved the step. No start touches a step of a
   later start, and readers follow the course of the highest start (origin.py, start.py).

The order on the disk is: a step's files, its folder, its name, the pointer's contents, the
pointer's name, and only after these the deletions.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from megatron_lite.checkpointing import points
from megatron_lite.checkpointing.lock import LOCK, DirectoryLock, LockLost
from megatron_lite.checkpointing.manifest import MANIFEST, Manifest
from megatron_lite.checkpointing.points import Point
from megatron_lite.checkpointing.step_files import (
    CONDEMNED,
    LATEST,
    STEP_NAME,
    SUPERSEDED,
    UNFINISHED,
    write_synced,
)
from megatron_lite.config.checks import InputError
from megatron_lite.data.durable_files import sync_folder


class SaveDirectory:
    """The changes that rank 0 may make in the directory of --save.

    Every method raises LockLost if a later start has taken the lock.
    """

    def __init__(self, root: Path, lock: DirectoryLock) -> None:
        self.root, self.lock = root, lock

    def supersede(self, step: Path) -> str:
        """Renames a step to a name that no reader considers. Returns that name."""
        target, number = step.with_suffix(".superseded"), 1
        while target.exists():
            number += 1
            target = step.with_suffix(f".superseded{number}")
        self.take_away(step, target)
        sync_folder(str(self.root))
        points.reached(Point.SUPERSEDED)
        return target.name

    def delete(self, step: Path, *, condemned: Point | None = None) -> None:
        """Deletes a step.

        The step is renamed first, so that a kill never leaves part of a step under a step's name.
        condemned: the point that is reached between the rename and the deletion.
        """
        target = step.with_suffix(f".deleted-{self.lock.token}")
        self.take_away(step, target)
        sync_folder(str(self.root))
        if condemned is not None:
            points.reached(condemned)
        self.lock.check()
        # The manifest goes first: without it, the rest that a kill leaves does not look complete.
        (target / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(target, ignore_errors=True)

    def take_away(self, step: Path, target: Path) -> None:
        """Renames a step of this start or an earlier one. The caller syncs the folder."""
        self.lock.check()
        self._check_not_later(step)
        self.rename(step, target)
        try:
            self.lock.check()
        except LockLost:
            with suppress(OSError):  # the rename fails if the later start uses the name again
                os.rename(target, step)
            raise

    def _check_not_later(self, step: Path) -> None:
        try:
            start = Manifest.read(step).origin.start
        except InputError:
            return
        if start > self.lock.start:
            raise LockLost(
                f"{step} was saved by a later start (number {start}, this one has "
                f"{self.lock.start}): this one writes no more checkpoints"
            )

    def rename(self, source: Path, target: Path) -> None:
        """Renames a file or folder of this start. The caller syncs the folder."""
        self.lock.check()
        try:
            os.replace(source, target)
        except OSError:
            # A later start may have removed the source. LockLost names that cause better than the
            # "no such file" of the rename.
            self.lock.check()
            raise


def check_no_checkpoint(path: Path, what: str) -> None:
    """Raises InputError if a file that a run is to write belongs to a checkpoint directory.

    what: the flag that names the file, and its value.
    """
    place = path.resolve()
    kinds = (STEP_NAME, SUPERSEDED, UNFINISHED, CONDEMNED)
    names = (place.name, place.parent.name)
    if place.name in (LATEST, LOCK) or any(kind.fullmatch(one) for kind in kinds for one in names):
        raise InputError(
            f"{what}: belongs to a checkpoint, which writing it would damage: choose another file"
        )


def publish_step(directory: SaveDirectory, temporary: Path, iteration: int) -> None:
    """Gives a written and synced step its name, and writes the pointer to it.

    An older step of the same name is moved aside first, and deleted once the pointer is written.
    """
    final = directory.root / f"iter_{iteration:07d}"
    aside = final.with_suffix(".old")
    if final.exists():
        if aside.exists():
            directory.delete(aside)  # readers prefer iter_N to iter_N.old while both exist
        directory.take_away(final, aside)
        points.reached(Point.ASIDE)
    directory.rename(temporary, final)
    sync_folder(str(directory.root))
    points.reached(Point.RENAMED)
    _point_at(directory, iteration)
    points.reached(Point.POINTED)
    if aside.exists():
        with suppress(OSError):  # the new step is durable; the next start removes the rest
            directory.delete(aside)


def _point_at(directory: SaveDirectory, iteration: int) -> None:
    temporary = directory.root / f"{LATEST}.tmp-{directory.lock.token}"
    try:
        write_synced(temporary, str(iteration).encode())
        points.reached(Point.POINTER)
        directory.rename(temporary, directory.root / LATEST)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(str(directory.root))
