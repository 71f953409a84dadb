"""Where a run begins: the newest step under --load that is what was written, decided once and alike on every rank.

The pointer names a step. Where it is broken, or the step is, that is reported, and the next older step is tried, and so on; never
a later one, which belongs to a course that was left. Only a broken pointer makes all steps candidates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megatron_lite.checkpointing.files import LATEST, read_pointer, saved_steps, step_directory
from megatron_lite.checkpointing.manifest import Manifest
from megatron_lite.checkpointing.metadata import Metadata
from megatron_lite.checkpointing.progress import Progress
from megatron_lite.config.checks import InputError
from megatron_lite.config.training import CheckpointConfig
from megatron_lite.parallel.collectives import all_gather_bytes
from megatron_lite.parallel.state import ParallelState

MOST_REPORTED = 5
FaultOf = Callable[[Path], str | None]


@dataclass(frozen=True, kw_only=True)
class Start:
    """step, metadata: None where the run starts from scratch. progress: how far it has come; 0 with --finetune."""

    step: Path | None = None
    metadata: Metadata | None = None
    progress: Progress = field(default_factory=Progress)
    notices: tuple[str, ...] = ()


class Candidates(NamedTuple):
    """fault: of the pointer. steps: iterations to try, the first one first. later: those that the pointer leaves out."""

    fault: str | None
    steps: list[int]
    later: list[int]


class Found(NamedTuple):
    """notices: what was passed over, and why."""

    step: Path
    notices: tuple[str, ...]


def find_start(options: CheckpointConfig, parallel: ParallelState) -> Start:
    """What --load asks for. Every rank must call this: each reads a share of every step that is tried, to compare checksums.

    InputError on every rank: nothing there (unless --allow-fresh-start), no good step, or the first one is damaged and
    --no-load-fallback is given.
    """
    if options.load is None:
        return Start()
    root = Path(options.load)
    listed = parallel.together("--load", lambda: json.dumps(candidates(root)).encode() if parallel.rank == 0 else b"")
    there = Candidates(*json.loads(all_gather_bytes(listed, parallel.world_group)[0]))
    if not there.steps:
        return Start(notices=(_nothing_there(options, there),))

    def fault_of(step: Path) -> str | None:
        found = step_fault(step, rank=parallel.rank, size=parallel.world_size)
        faults = [fault.decode() for fault in all_gather_bytes((found or "").encode(), parallel.world_group)]
        return next(filter(None, faults), None)

    found = newest_good_step(root, there, fault_of, fallback=not options.no_load_fallback)
    metadata = parallel.together("--load", lambda: Metadata.read(found.step))
    return Start(step=found.step, metadata=metadata, progress=Progress() if options.finetune else metadata.progress,
                 notices=found.notices)


def candidates(root: Path) -> Candidates:
    """The steps under `root` in the order in which they are tried."""
    steps = saved_steps(root)
    if not steps and not (root / LATEST).exists():
        return Candidates(None, [], [])
    try:
        newest = read_pointer(root)
    except InputError as error:
        return Candidates(str(error), steps[::-1], [])
    return Candidates(None, [step for step in reversed(steps) if step <= newest], [step for step in steps if step > newest])


def newest_good_step(root: Path, there: Candidates, fault_of: FaultOf, *, fallback: bool) -> Found:
    """The first candidate without a fault. InputError where there is none, or where an earlier one had to be passed over and
    that is not wanted."""
    notices = [f"{root}: later than the checkpoint that {LATEST} names, and not used: {_names(root, there.later)}"] \
        if there.later else []
    faults = [] if there.fault is None else [there.fault]
    for number in there.steps:
        if faults and not fallback:
            break
        step = step_directory(root, number)
        fault = fault_of(step)
        if fault is None:
            notices += [f"warning: {one}" for one in faults]
            if faults:
                notices.append(f"warning: going on from the newest good checkpoint instead, {step.name}")
            return Found(step, tuple(notices))
        faults.append(fault)
    shown = "\n  ".join(faults[:MOST_REPORTED])
    advice = "restore what is damaged" + ("" if fallback else ", or leave out --no-load-fallback to use an earlier checkpoint")
    raise InputError(f"--load {root}: no good checkpoint: {advice}\n  {shown}")


def step_fault(step: Path, *, rank: int = 0, size: int = 1) -> str | None:
    """Why a step cannot be relied on; None where it is what was written. Reads the share of one of `size` ranks."""
    try:
        manifest = Manifest.read(step)
        manifest.check_sizes(step)
        manifest.check_contents(step, manifest.share(rank, size))
        metadata = Metadata.read(step)
        missing = sorted(metadata.expected_files() - set(manifest.files))
        if missing or f"iter_{manifest.iteration:07d}" != step.stem:
            raise InputError(f"{step}: " + (f"{missing[0]} is not in the manifest" if missing else
                                            f"the manifest is that of iteration {manifest.iteration}"))
    except InputError as error:
        return str(error)
    return None


def _nothing_there(options: CheckpointConfig, there: Candidates) -> str:
    if there.fault is not None:
        raise InputError(f"--load {options.load}: {there.fault}, and there is no checkpoint to use instead. Remove the file to "
                         "start from scratch")
    if options.allow_fresh_start:
        return f"--load {options.load}: no checkpoint there, starting from scratch"
    raise InputError(f"--load {options.load}: no checkpoint there (no {LATEST}). Correct the path, or add --allow-fresh-start to "
                     "begin without one")


def _names(root: Path, steps: Sequence[int]) -> str:
    return ", ".join(step_directory(root, step).name for step in steps)
