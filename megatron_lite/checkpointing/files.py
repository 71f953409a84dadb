"""The layout of a checkpoint directory, and writing so that a kill leaves either the old state or the new one.

    DIR/latest_checkpointed_iteration.txt      "40", replaced only once iter_0000040 is complete
    DIR/iter_0000040/config.json               the RunConfig
                     metadata.json             progress, and the sizes of the parallel axes
                     parameters_pp00.json      of each parameter of a pipeline rank its global shape and split
                     model_pp00_tp00of02.safetensors        one rank's shards, by parameter name, without vocabulary padding
                     optimizer_pp00_tp00of02.safetensors    NAME/exp_avg, NAME/exp_avg_sq, NAME/master
                     rng_00000.safetensors              random-number streams, one file per rank

A step is written into iter_0000040.tmp, synced, and renamed. Tensors that all TP ranks hold alike are in rank 0's file only;
a tied embedding is in the first pipeline rank's only.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from megatron_lite.config.checks import InputError
from megatron_lite.data.files import sync_file, sync_folder

LATEST = "latest_checkpointed_iteration.txt"
CONFIG, METADATA = "config.json", "metadata.json"


def step_directory(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration stands."""
    return root / f"iter_{iteration:07d}"


def shard_file(kind: str, pp_rank: int, tp_rank: int, tp_size: int) -> str:
    """File name of one TP rank's "model" or "optimizer" tensors of the stages of one pipeline rank."""
    return f"{kind}_pp{pp_rank:02d}_tp{tp_rank:02d}of{tp_size:02d}.safetensors"


def parameters_file(pp_rank: int) -> str:
    """File name of the parameters' layouts of one pipeline rank."""
    return f"parameters_pp{pp_rank:02d}.json"


def rng_file(rank: int) -> str:
    """File name of one rank's random-number streams."""
    return f"rng_{rank:05d}.safetensors"


def latest_step(root: Path) -> Path | None:
    """The newest complete checkpoint under `root`; None where none was ever saved. InputError where the pointer is broken."""
    pointer = root / LATEST
    if not pointer.is_file():
        return None
    text = pointer.read_text(errors="replace")[:32].strip()
    if not re.fullmatch(r"\d{1,9}", text):
        raise InputError(f"{pointer}: expected an iteration number, found {text!r}: write the number of a complete iter_* "
                         "folder into it")
    step = step_directory(root, int(text))
    if not step.exists() and step.with_suffix(".old").exists():
        step = step.with_suffix(".old")  # killed while the step was being replaced: the one before it is whole
    if not (step / METADATA).is_file():
        raise InputError(f"{pointer} names iteration {text}, but {step / METADATA} does not exist: write the number of a "
                         "complete iter_* folder into it")
    return step


def write_durably(path: Path, data: bytes) -> None:
    """Replaces `path` by `data` in one step: written beside it, synced, renamed."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        sync_file(file)
    os.replace(temporary, path)
    sync_folder(str(path.parent))


def start_step(root: Path, iteration: int) -> Path:
    """An empty temporary folder for a step; what an interrupted save left there is removed."""
    temporary = step_directory(root, iteration).with_suffix(".tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


def publish_step(root: Path, iteration: int) -> None:
    """Renames a written step into place and points at it. A step saved there before is moved aside until then."""
    final = step_directory(root, iteration)
    aside = final.with_suffix(".old")
    if aside.exists() and final.exists():  # the newer of two replaced steps is enough
        shutil.rmtree(aside)
    sync_folder(str(final.with_suffix(".tmp")))
    if final.exists():
        os.replace(final, aside)
    os.replace(final.with_suffix(".tmp"), final)
    sync_folder(str(root))
    write_durably(root / LATEST, str(iteration).encode())
    if aside.exists():
        shutil.rmtree(aside)
