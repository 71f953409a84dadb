"""Decides which steps stay: all of them, the last K, or every N-th iteration.

A step is deleted only if it is older than a durable step. A step that is not complete is neither
counted among the last K nor deleted. Therefore the K steps that stay can be loaded, as far as names
and sizes show.

A step that was set aside (iter_N.superseded) belongs to a course that was left. Without
--save-keep-last and --save-retain-interval it stays for ever. With one of them it is deleted once
the run has saved a complete step of iteration N or later. Until that point it may be the farthest
step of any course. A step that was set aside and is not complete stays too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_lite.checkpointing import points
from megatron_lite.checkpointing.directory import SaveDirectory
from megatron_lite.checkpointing.manifest import Manifest, is_complete
from megatron_lite.checkpointing.origin import Origin
from megatron_lite.checkpointing.points import Point
from megatron_lite.checkpointing.step_files import (
    CONDEMNED,
    STEP_NAME,
    SUPERSEDED,
    UNFINISHED,
    saved_steps,
    step_directory,
)
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.checks import InputError


def steps_to_delete(
    complete: Sequence[int], *, newest: int, keep_last: int | None, retain_interval: int | None
) -> list[int]:
    """Returns the iterations of the complete steps to delete, oldest first.

    newest: the iteration that was just saved. No later step is deleted.
    keep_last, retain_interval: the flags; if both are None, no step is deleted.
    """
    if keep_last is None and retain_interval is None:
        return []
    course = sorted(step for step in complete if step <= newest)
    last = course[-(keep_last or 1) :]  # the newest step stays, whatever the flags say
    return [
        step
        for step in course
        if step not in last and (retain_interval is None or step % retain_interval)
    ]


def delete_old_steps(
    directory: SaveDirectory, root: Path, options: CheckpointConfig, *, newest: int
) -> None:
    """Deletes the steps that the flags do not keep.

    Call it when the pointer names `newest` and is durable.
    """
    if options.save_keep_last is None and options.save_retain_interval is None:
        return
    complete = [step for step in saved_steps(root) if is_complete(step_directory(root, step))]
    if newest not in complete:
        return
    for step in steps_to_delete(
        complete,
        newest=newest,
        keep_last=options.save_keep_last,
        retain_interval=options.save_retain_interval,
    ):
        directory.delete(step_directory(root, step), condemned=Point.CONDEMNED)
        points.reached(Point.DELETED)
    for path in sorted(root.iterdir()):
        name = SUPERSEDED.fullmatch(path.name)
        if name is not None and int(name[1]) <= newest and is_complete(path):
            directory.delete(path)


def supersede_other_courses(
    directory: SaveDirectory, root: Path, *, started_at: int, own: Iterable[int], origin: Origin
) -> list[str]:
    """Renames the steps that do not lead to this run's steps. Returns their new names.

    If the pointer were lost, a reader could otherwise mistake them for steps of this run. Such a
    step is later than the step that the run went on from, or belongs to a course that was left.

    started_at: the iteration of the step that the run went on from.
    own: the iterations of the steps that this run has saved.
    origin: the origin of these steps.
    """
    others = (step for step in saved_steps(root) if step not in set(own))
    return [
        directory.supersede(step_directory(root, step))
        for step in others
        if step > started_at or _was_left(step_directory(root, step), step, origin)
    ]


def remove_leftovers(root: Path, token: str) -> None:
    """Removes what killed and stale starts left, and gives steps their names back.

    Only the start that has just taken the lock may call this, before it chooses a step. Afterwards
    no earlier start can publish anything (directory.py).

    token: the token of this start.
    """
    for path in sorted(root.iterdir()):
        with suppress(OSError):
            if UNFINISHED.fullmatch(path.name):
                _remove(path, token)
            elif CONDEMNED.fullmatch(path.name) and path.suffix != f".deleted-{token}":
                # Its start was killed between the rename and the deletion, or has lost the lock
                # since. A complete step gets its name back.
                final = path.with_suffix("")
                if (
                    is_complete(path)
                    and not final.exists()
                    and not final.with_suffix(".old").exists()
                ):
                    os.rename(path, final)
                else:
                    _remove(path, token)
    # A start was killed while it replaced iter_N. The new step is kept if it is complete, else the
    # old one if that is complete, else both.
    for path in _replaced(root):
        with suppress(OSError):
            if is_complete(path.with_suffix("")):
                _remove(path, token)
            elif is_complete(path):
                _remove(path.with_suffix(""), token)
                os.rename(path, path.with_suffix(""))


def _replaced(root: Path) -> Iterator[Path]:
    """Yields each iter_N.old beside which an iter_N exists."""
    return (
        path
        for path in sorted(root.iterdir())
        if path.suffix == ".old"
        and STEP_NAME.fullmatch(path.name)
        and path.with_suffix("").exists()
    )


def _remove(path: Path, token: str) -> None:
    """Removes a file or a folder. A folder is renamed first and deleted afterwards.

    The rename is atomic. Another process has either published the step before it, or can no longer
    publish it, because the name is gone.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    target, number = path.with_suffix(f".deleted-{token}"), 1
    while target.exists():
        number += 1
        target = path.with_suffix(f".deleted-{token}_{number}")
    os.rename(path, target)
    shutil.rmtree(target, ignore_errors=True)


def _was_left(path: Path, step: int, origin: Origin) -> bool:
    try:
        return not origin.includes(Manifest.read(path).origin, step)
    except InputError:
        return False
