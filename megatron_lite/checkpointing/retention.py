"""Which steps stay: all, the last K, every N-th iteration. Deleted is only what is older than a durable step.

A step that is not complete counts for nothing: it is neither among the last K nor deleted. So the K steps that stay can be
loaded, as far as names and sizes tell.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_lite.checkpointing import points
from megatron_lite.checkpointing.files import LEFTOVER, STEP_NAME, saved_steps, step_directory
from megatron_lite.checkpointing.manifest import is_complete
from megatron_lite.checkpointing.points import Point
from megatron_lite.config.training import CheckpointConfig
from megatron_lite.data.files import sync_folder


def steps_to_delete(complete: Sequence[int], *, newest: int, keep_last: int | None, retain_interval: int | None) -> list[int]:
    """Of the iterations of complete steps those that go, oldest first: none later than `newest`, the one just saved."""
    if keep_last is None and retain_interval is None:
        return []
    course = sorted(step for step in complete if step <= newest)
    last = course[-(keep_last or 1):]
    return [step for step in course if step not in last and (retain_interval is None or step % retain_interval)]


def delete_old_steps(root: Path, options: CheckpointConfig, *, newest: int) -> None:
    """Deletes what the flags do not keep. Each step first loses its name, so that a kill leaves no half of one."""
    if options.save_keep_last is None and options.save_retain_interval is None:
        return
    complete = [step for step in saved_steps(root) if is_complete(step_directory(root, step))]
    for step in steps_to_delete(complete, newest=newest, keep_last=options.save_keep_last,
                                retain_interval=options.save_retain_interval):
        path = step_directory(root, step)
        condemned = path.with_suffix(".deleted")
        os.replace(path, condemned)
        sync_folder(str(root))
        points.reached(Point.CONDEMNED)
        shutil.rmtree(condemned)
        points.reached(Point.DELETED)


def remove_leftovers(root: Path) -> None:
    """Removes what killed saves and deletions left. Only for the run that holds the directory."""
    for path in root.iterdir():
        replaced = path.suffix == ".old" and STEP_NAME.fullmatch(path.name) and is_complete(path.with_suffix(""))
        if replaced or LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def supersede_later_steps(root: Path, *, started_at: int, own: Iterable[int]) -> list[str]:
    """Renames steps later than the one this run went on from, except its own; their new names.

    They belong to a course that was left, or are damaged, and must not be taken for this run's if its pointer is ever lost.
    """
    renamed = []
    for step in saved_steps(root):
        if step > started_at and step not in own:
            path, number = step_directory(root, step), 1
            target = root / f"iter_{step:07d}.superseded"
            while target.exists():
                number += 1
                target = target.with_suffix(f".superseded{number}")
            os.replace(path, target)
            sync_folder(str(root))
            renamed.append(target.name)
            points.reached(Point.SUPERSEDED)
    return renamed
