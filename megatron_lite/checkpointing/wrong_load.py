"""Advice for a `--load` that names no checkpoint: what is there instead, and what to give."""

from __future__ import annotations

import shlex
from pathlib import Path

from megatron_lite.checkpointing.step_files import LATEST, STEP_NAME
from megatron_lite.config.invocation import subcommand

NAMED = 3  # folders that a message lists


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
