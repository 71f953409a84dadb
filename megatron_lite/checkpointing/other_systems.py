"""Tells what lies under a --load that has no step: a checkpoint of another system, or none.

A checkpoint of Megatron-LM needs a conversion first. Both systems name the newest iteration in
latest_checkpointed_iteration.txt, so that without this check a run would find such a checkpoint
damaged.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from megatron_lite.checkpointing.metadata import MANIFEST
from megatron_lite.checkpointing.step_files import LATEST, STEP_NAME
from megatron_lite.config.checks import InputError
from megatron_lite.config.invocation import subcommand

ITERATION = re.compile(r"iter_\d{7,9}|release")
RANK_FOLDER = re.compile(r"mp_rank_\d{2}(_\d{3}){0,2}")
# Of torch's distributed checkpoints.
DIST_METADATA = ".metadata"
NAMED = 3  # folders that a message lists


def check_ours(root: Path, program: str) -> None:
    """Raises InputError with the command that converts it if `root` is one of Megatron-LM.

    program: the name of the program that the user started.
    """
    found = megatron_format(root)
    if found is None:
        return
    load, save = shlex.quote(str(root)), shlex.quote(f"{str(root).rstrip('/')}-converted")
    raise InputError(
        f"--load {root}: is a checkpoint of Megatron-LM, which needs a conversion first. Run\n"
        f"  {shlex.join(subcommand(program, 'convert'))} --from {found} --to megatron-lite "
        f"--load {load} --save {save}\n"
        f"and then --load {save}"
    )


def megatron_format(root: Path) -> str | None:
    """Returns the name of the format in tools/convert.py; None if it is none of Megatron-LM."""
    if not root.is_dir():
        return None
    folders = [root, *(one for one in root.iterdir() if ITERATION.fullmatch(one.name))]
    found = None
    for folder in (one for one in folders if one.is_dir()):
        names = {one.name for one in folder.iterdir()}
        if MANIFEST in names:
            return None  # a step of this project, whatever lies beside it
        if any(map(RANK_FOLDER.fullmatch, names)):
            found = "megatron"
        elif DIST_METADATA in names:
            found = "megatron-dist"
    return found


def load_advice(load: str, program: str) -> str:
    """Returns what to do about a folder without a checkpoint, as the end of a message.

    program: the name of the program that the user started.
    """
    root = Path(load)
    if not root.exists():
        return "no such folder: give the folder that --save of the run named"
    if not root.is_dir():
        return "it is a file: give the folder that --save of the run named"
    step = STEP_NAME.fullmatch(root.resolve().name)
    if step is not None and (root.resolve().parent / LATEST).is_file():
        return f"it is the checkpoint of iteration {int(step[1])}: give --load {root.parent}"
    inside = sorted(pointer.parent for pointer in root.glob(f"*/{LATEST}"))
    if inside:
        more = ", ..." if len(inside) > NAMED else ""
        return f"did you mean --load {' or '.join(map(str, inside[:NAMED]))}{more}?"
    if (root / "config.json").is_file():
        words = ("--from", "hf", "--to", "megatron-lite", "--load", load, "--save", "NEW_FOLDER")
        return (
            "it looks like a model of Hugging Face, which this command converts: "
            f"{shlex.join([*subcommand(program, 'convert'), *words])}"
        )
    return "give the folder that --save of the run named"
