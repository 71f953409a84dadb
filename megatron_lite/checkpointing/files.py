"""The layout of a checkpoint directory, and writing so that a kill leaves either the old state or the new one.

    DIR/latest_checkpointed_iteration.txt      "40", replaced only once iter_0000040 is complete
    DIR/lock.json                              who writes here (lock.py)
    DIR/iter_0000040/config.json               the RunConfig
                     metadata.json             progress, the sizes of the parallel axes, the identity of the data
                     parameters_pp00.json      of each parameter of a pipeline rank its global shape and split
                     model_pp00_tp00of02.safetensors        one rank's shards, by parameter name, without vocabulary padding
                     optimizer_pp00_tp00of02.safetensors    NAME/exp_avg, NAME/exp_avg_sq, NAME/master
                     rng_00000.safetensors              random-number streams, one file per rank
                     manifest.json             size and SHA-256 of each of these, written last

A step is written into iter_0000040.tmp-TOKEN, synced, and renamed. Tensors that all TP ranks hold alike are in rank 0's file
only; a tied embedding is in the first pipeline rank's only. Other names are no steps: iter_N.tmp-TOKEN and iter_N.deleted (left
by a kill, removed by the next run), iter_N.superseded (later than where a run went on from: kept, never read). iter_N.old is the
step while another one takes its place, and counts where iter_N is missing.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from megatron_lite.checkpointing import points
from megatron_lite.checkpointing.points import Point
from megatron_lite.config.checks import InputError
from megatron_lite.data.files import sync_file, sync_folder

LATEST = "latest_checkpointed_iteration.txt"
CONFIG, METADATA = "config.json", "metadata.json"
STEP_NAME = re.compile(r"iter_(\d{7,9})(\.old)?")
LEFTOVER = re.compile(r"iter_\d{7,9}\.(tmp|tmp-\w+|deleted)|" + re.escape(LATEST) + r"\.tmp")


def step_directory(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration stands."""
    final = root / f"iter_{iteration:07d}"
    old = final.with_suffix(".old")
    return old if old.exists() and not final.exists() else final


def shard_file(kind: str, pp_rank: int, tp_rank: int, tp_size: int) -> str:
    """File name of one TP rank's "model" or "optimizer" tensors of the stages of one pipeline rank."""
    return f"{kind}_pp{pp_rank:02d}_tp{tp_rank:02d}of{tp_size:02d}.safetensors"


def parameters_file(pp_rank: int) -> str:
    """File name of the parameters' layouts of one pipeline rank."""
    return f"parameters_pp{pp_rank:02d}.json"


def rng_file(rank: int) -> str:
    """File name of one rank's random-number streams."""
    return f"rng_{rank:05d}.safetensors"


def saved_steps(root: Path) -> list[int]:
    """The iterations of which a step stands under `root`, good or damaged, in ascending order."""
    names = (STEP_NAME.fullmatch(path.name) for path in root.iterdir()) if root.is_dir() else ()
    return sorted({int(name[1]) for name in names if name is not None})


def read_pointer(root: Path) -> int:
    """The iteration that the pointer names. InputError where it is missing, or names no step."""
    pointer = root / LATEST
    if not pointer.is_file():
        raise InputError(f"{pointer}: no such file")
    text = read_bounded(pointer, 32).decode(errors="replace").strip()
    if not re.fullmatch(r"\d{1,9}", text):
        raise InputError(f"{pointer}: expected an iteration number, found {text!r}")
    step = step_directory(root, int(text))
    if not step.is_dir():
        raise InputError(f"{pointer}: names iteration {text}, but {step.name} does not exist")
    return int(text)


def read_bounded(path: Path, limit: int) -> bytes:
    """All of a file. InputError where it cannot be read, or is longer than `limit` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): the checkpoint is incomplete or damaged") from error
    if len(data) > limit:
        raise InputError(f"{path}: longer than {limit} bytes: the checkpoint is damaged")
    return data


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file whose folder is synced later."""
    with path.open("wb") as file:
        file.write(data)
        sync_file(file)


def write_durably(path: Path, data: bytes, *, point: Point | None = None) -> None:
    """Replaces `path` by `data` in one step: written beside it, synced, renamed. point: reached before it is renamed."""
    temporary = path.with_name(path.name + ".tmp")
    write_synced(temporary, data)
    if point is not None:
        points.reached(point)
    os.replace(temporary, path)
    sync_folder(str(path.parent))


def publish_step(temporary: Path, iteration: int) -> None:
    """Renames a written step into place and points at it. A step saved there before is moved aside until then."""
    root = temporary.parent
    final = root / f"iter_{iteration:07d}"
    aside = final.with_suffix(".old")
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)  # the newer of two replaced steps is enough
        os.replace(final, aside)
        points.reached(Point.ASIDE)
    os.replace(temporary, final)
    sync_folder(str(root))
    points.reached(Point.RENAMED)
    write_durably(root / LATEST, str(iteration).encode(), point=Point.POINTER)
    points.reached(Point.POINTED)
    shutil.rmtree(aside, ignore_errors=True)
