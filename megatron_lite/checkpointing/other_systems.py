"""Recognises a checkpoint of Megatron-LM under --load, which needs a conversion first.

Both systems name the newest iteration in latest_checkpointed_iteration.txt, so that without this
check a run would find such a checkpoint damaged.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from megatron_lite.checkpointing.manifest import MANIFEST
from megatron_lite.config.checks import InputError
from megatron_lite.config.invocation import subcommand

ITERATION = re.compile(r"iter_\d{7,9}|release")
RANK_FOLDER = re.compile(r"mp_rank_\d{2}(_\d{3}){0,2}")
# Of torch's distributed checkpoints.
DIST_METADATA = ".metadata"


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
