"""The directory of --save: who may change it, which names its steps have, and which steps stay.

Each change is one rename, right after a check of the lock. A hanging file server can hold a process
between the check and the rename. Meanwhile a later start can take the lock and go on. Two rules
keep such a stale start from doing harm:

1. A start publishes a step or the pointer only by renaming a folder or file whose name contains
   its token. When the later start takes the lock, it removes or renames all of these, before it
   chooses a step. A rename that comes late finds nothing to rename.
2. A start that takes a step's name away (to set it aside or delete it) checks the lock again before
   it deletes anything. If the lock is lost, the step gets its name back. It never takes away a step
   that a start of a higher number has saved, even if it holds the lock.

The order on the disk is: a step's files, its folder, its name, the new names of the steps that do
not lead to it, the pointer's contents, the pointer's name, and only after these the deletions. A
kill between the step's name and the pointer's leaves a run that goes on from the step before, or
from the new one if that is the first of its start.

Which steps stay: all of them, the last K, or every N-th iteration. A step is deleted only if it is
older than a durable step. A step that is not complete is neither counted among the last K nor
deleted. A step that was set aside (iter_N.superseded) is deleted with these flags alone, once the
run has saved iteration N or a later one: until then it may be the farthest step of any course.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.checks import InputError
from megatron_lite.data.durable_files import sync, write_synced
from megatron_lite.parallel.state import ParallelState

from .lock import LOCK, DirectoryLock, Holder, LockLost
from .metadata import MANIFEST, Manifest, is_complete
from .step_files import (
    CONDEMNED,
    LATEST,
    REPLACED,
    STEP_NAME,
    SUPERSEDED,
    UNFINISHED,
    saved_step,
    saved_steps,
    step_directory,
)


class SaveDirectory(DirectoryLock):
    """The changes that rank 0 may make in the directory of --save, which is locked for them.

    Every method raises LockLost if a later start has taken the lock.
    """

    def unfinished(self, iteration: int) -> Path:
        """Returns the folder into which this start writes a step before it has its name."""
        return step_directory(self.root, iteration).with_suffix(f".tmp-{self.token}")

    def publish(self, iteration: int, *, leads_here: Callable[[int], bool]) -> list[str]:
        """Gives a written and synced step its name, and writes the pointer to it.

        leads_here: whether a step of another iteration belongs to this run's course. The others
        are set aside, since a reader without the pointer could mistake them for steps of this run.
        Returns notices for the log. A step that cannot be set aside is one of them.
        """
        root, final = self.root, step_directory(self.root, iteration)
        # A step of this iteration is iter_N.old until the new one has the name: after a kill in
        # between, the next start gives it its name back.
        replaced = final.with_suffix(".old")
        if final.exists():
            if replaced.exists():  # a try before this one ended in between
                self._supersede(replaced)
            self._take_away(final, replaced)
        self._rename(self.unfinished(iteration), final)
        sync(root)
        left, notices = [replaced] if replaced.exists() else [], []
        for number in saved_steps(root):
            if number != iteration and not leads_here(number):
                left.append(step_directory(root, number))
        for step in left:
            try:
                name = self._supersede(step)
                notices.append(f"{root}: a step that does not lead to this run's is now {name}")
            except OSError as error:
                said = f"{step}: does not lead to this run's, and cannot be set aside ({error})"
                notices.append(f"warning: {said}")
        pointer = root / f"{LATEST}.tmp-{self.token}"
        try:
            write_synced(pointer, str(iteration).encode())
            self._rename(pointer, root / LATEST)
        finally:
            pointer.unlink(missing_ok=True)
        sync(root)
        return notices

    def delete_old_steps(self, options: CheckpointConfig, *, newest: int) -> None:
        """Deletes the steps that the flags do not keep. The pointer to `newest` must be durable."""
        keep_last, interval = options.save_keep_last, options.save_retain_interval
        if keep_last is None and interval is None:
            return
        complete = [
            step for step in saved_steps(self.root) if is_complete(step_directory(self.root, step))
        ]
        for step in steps_to_delete(
            complete, newest=newest, keep_last=keep_last, retain_interval=interval
        ):
            self._delete(step_directory(self.root, step))
        for path in sorted(self.root.iterdir()):
            name = SUPERSEDED.fullmatch(path.name)
            if name and int(name[1]) <= newest:
                self._delete(path)

    def remove_leftovers(self) -> None:
        """Removes what killed and stale starts left.

        Only the start that has just taken the lock may call this, before it chooses a step.
        Afterwards no earlier start can publish anything.
        """
        for path in sorted(self.root.iterdir()):
            with suppress(OSError):
                if CONDEMNED.fullmatch(path.name):
                    shutil.rmtree(path)
                elif UNFINISHED.fullmatch(path.name):
                    if path.name.startswith(LATEST) or path.is_symlink():
                        path.unlink()
                    else:
                        # The rename is atomic. Another process has either published the step before
                        # it, or can no longer publish it, because the name is gone.
                        gone = path.with_name(path.name.replace(".tmp", ".deleted"))
                        os.rename(path, gone)
                        shutil.rmtree(gone)
                elif REPLACED.fullmatch(path.name):
                    step = path.with_suffix("")
                    gone = path.with_suffix(f".deleted-{self.token}")
                    if is_complete(step):
                        os.rename(path, gone)
                    else:
                        if step.exists():
                            os.rename(step, gone)
                        os.rename(path, step)
                    shutil.rmtree(gone, ignore_errors=True)

    def _supersede(self, step: Path) -> str:
        """Renames a step to a name that no reader considers. Returns that name."""
        target, number = step.with_suffix(".superseded"), 1
        while target.exists():
            number += 1
            target = step.with_suffix(f".superseded{number}")
        self._take_away(step, target)
        return target.name

    def _delete(self, step: Path) -> None:
        """Deletes a step.

        The step is renamed first, so that a kill never leaves part of a step under a step's name.
        """
        target = step.with_name(f"{step.name.split('.')[0]}.deleted-{self.token}")
        self._take_away(step, target)
        # The manifest goes first: without it, the rest that a kill leaves does not look complete.
        (target / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(target, ignore_errors=True)

    def _take_away(self, step: Path, target: Path) -> None:
        if Manifest.read_or_empty(step).start > self.holder.start:
            raise LockLost(
                f"{step} was saved by a later start: this one was given up for lost, and writes no "
                "more checkpoints"
            )
        self._rename(step, target)
        try:
            self.check()
        except LockLost:
            with suppress(OSError):  # the rename fails if the later start uses the name again
                os.rename(target, step)
            raise
        sync(self.root)

    def _rename(self, source: Path, target: Path) -> None:
        """Renames a file or folder of this start. The caller syncs the folder."""
        self.check()
        try:
            os.replace(source, target)
        except OSError:
            # A later start may have removed the source. LockLost names that cause better than the
            # "no such file" of the rename.
            self.check()
            raise


def steps_to_delete(
    complete: Sequence[int], *, newest: int, keep_last: int | None, retain_interval: int | None
) -> list[int]:
    """Returns the iterations of the complete steps to delete, oldest first.

    newest: the iteration that was just saved. No later step is deleted.
    keep_last, retain_interval: the flags, of which at least one is given.
    """
    course = sorted(step for step in complete if step <= newest)
    last = course[-(keep_last or 1) :]  # the newest step stays, whatever the flags say
    return [
        step
        for step in course
        if step not in last and (retain_interval is None or step % retain_interval)
    ]


def claim_directory(options: CheckpointConfig, parallel: ParallelState) -> SaveDirectory | None:
    """Takes the lock on the directory of --save. Every rank must call this.

    Returns the directory on rank 0, and None on the others.
    Call it before any other work and before a step in the directory is chosen. Raises InputError if
    the directory cannot be written, if another run uses it, or if it holds checkpoints of another
    run. In the last case the checkpoints of both runs would mix.
    """
    assert options.save is not None
    root = Path(options.save)

    def take() -> SaveDirectory | None:
        if parallel.rank != 0:
            return None
        root.mkdir(parents=True, exist_ok=True)
        directory = SaveDirectory(root, Holder.this_process())
        try:
            # A run that does not continue from this directory must find no checkpoint in it. The
            # check needs the lock: without it, another run could still save a step.
            there = [*(saved_step(root, step) for step in saved_steps(root)), root / LATEST]
            found = [path.name for path in there if path.exists()]
            if found and not options.continues:
                raise InputError(
                    f"--save {root} holds a checkpoint already ({found[0]}): continue from "
                    f"it with --load {root}, or choose an empty directory"
                )
            directory.remove_leftovers()
        except BaseException:
            directory.release()
            raise
        return directory

    return parallel.together(f"--save {root} cannot be written", take)


def check_no_checkpoint(path: Path, what: str) -> None:
    """Raises InputError if a file that a run is to write belongs to a checkpoint directory.

    what: the flag that names the file, and its value.
    """
    place = path.resolve()
    kinds = (STEP_NAME, SUPERSEDED, UNFINISHED, CONDEMNED, REPLACED)
    names = (place.name, place.parent.name)
    if place.name in (LATEST, LOCK) or any(kind.fullmatch(one) for kind in kinds for one in names):
        raise InputError(
            f"{what}: belongs to a checkpoint, which writing it would damage: choose another file"
        )
