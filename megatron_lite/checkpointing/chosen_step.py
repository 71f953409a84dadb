"""The step that a tool reads: the newest good one, or the one of an iteration."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_lite.checkpointing.other_systems import load_advice
from megatron_lite.checkpointing.start import FoundStep, candidates, newest_good_step, step_fault
from megatron_lite.checkpointing.step_files import LATEST, saved_steps, step_directory
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import regular_path
from megatron_lite.config.invocation import SCRIPT


def find_step(load: str, iteration: int | None = None, program: str = SCRIPT) -> FoundStep:
    """Returns the checkpoint to read: the newest good one, or the one of `iteration`.

    program: the name of the program that the user started, for advice.
    Its checksums are verified. Raises InputError if no checkpoint exists, or if the one of
    `iteration` does not exist or is damaged.
    """
    root = Path(load)
    if os.path.lexists(root / LATEST):
        regular_path(root / LATEST)  # a run would do without it, and warn
    saved = saved_steps(root)
    if iteration is None:
        there = candidates(root, program)
        if not there.steps:
            raise InputError(
                f"--load {load}: no checkpoint there ({there.fault or f'no {LATEST}'}): "
                f"{load_advice(load, program)}"
            )
        return newest_good_step(root, there, step_fault, fallback=True)
    if iteration not in saved:
        raise InputError(
            f"--iteration {iteration}: no such checkpoint in {load} (there: "
            f"{', '.join(map(str, saved)) or 'none'})"
        )
    step = step_directory(root, iteration)
    if (fault := step_fault(step)) is not None:
        raise InputError(f"--iteration {iteration}: {fault}")
    return FoundStep(step, ())
