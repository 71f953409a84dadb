"""Chooses the checkpoint from which a run starts: the newest undamaged step under --load.

Rank 0 lists the candidates and all ranks check them together, so every rank chooses the same step.
The pointer file names the first candidate. If that step is damaged, the run reports the damage
and tries the next older step, and so on. It never tries a later step: such a step does not lead to
the one that the pointer names. If the pointer is broken, the run tries the newest step of the
highest start first (metadata.py). It does so too if that start saved a step after the pointer was
written, and the pointer names a step of an earlier start: a start that was given up for lost wrote
it. If a person sets the pointer afterwards, it is followed.

A checkpoint of Megatron-LM needs a conversion first. Both systems name the newest iteration in
latest_checkpointed_iteration.txt, so that without the check here a run would find such a checkpoint
damaged.
"""

import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import read_input, regular_path
from megatron_lite.config.invocation import subcommand
from megatron_lite.memory.predict.states import parameter_count
from megatron_lite.parallel.state import ParallelState

from .metadata import MANIFEST, Manifest, row_of
from .shards import SavedStep
from .step_files import (
    CONFIG,
    LATEST,
    METADATA,
    NO_PROGRESS,
    STEP_NAME,
    Progress,
    saved_step,
    saved_steps,
)

MOST_REPORTED = 5
NAMED = 3  # folders that a message lists
# A run may delete a step (--save-keep-last) that another wants to read. The steps are then listed
# again.
GONE = " is gone"
MOST_LISTED = 5


class Start(NamedTuple):
    """The point from which a run starts.

    saved: the checkpoint; None if the run starts from scratch.
    progress: how far the run has come; it is zero for weights alone.
    weights_only: whether the weights alone are taken, with --finetune or --pretrained-checkpoint.
    notices: lines for the log.
    """

    saved: SavedStep | None = None
    progress: Progress = NO_PROGRESS
    notices: tuple[str, ...] = ()
    weights_only: bool = False


class Candidates(NamedTuple):
    """The steps that a run may start from.

    fault: what is wrong with the pointer; None if it names a step.
    steps: the iterations to try, in this order.
    notices: lines for the log: which steps are not tried, and why the pointer is not followed.
    """

    fault: str | None
    steps: list[int]
    notices: list[str]


class FoundStep(NamedTuple):
    """The step to start from. notices: which steps were passed over, and why."""

    step: Path
    notices: tuple[str, ...]


def find_start(options: CheckpointConfig, parallel: ParallelState) -> Start:
    """Returns the point that --load asks for. Every rank must call this.

    Each rank reads a part of the files of every step that is tried, and compares their checksums.
    Raises InputError on every rank in three cases: the directory holds no step and
    --allow-fresh-start is not given; no step is good; the first step is damaged and
    --no-load-fallback is given.
    """
    if options.load is None:
        return _pretrained(options, parallel) or Start()
    root = Path(options.load)

    def listed() -> Candidates:
        found = parallel.together("--load", lambda: parallel.rank == 0 and candidates(root))
        return Candidates(*parallel.gathered(found)[0])

    there = listed()
    if not there.steps:
        if there.fault:
            raise InputError(
                f"--load {options.load}: {there.fault}, and there is no checkpoint to use instead. "
                "Remove the file to start from scratch"
            )
        if pretrained := _pretrained(options, parallel):
            return pretrained
        if options.allow_fresh_start or options.continues:
            notice = f"--load {options.load}: no checkpoint there, starting from scratch"
            return Start(notices=(notice,))
        raise InputError(
            f"--load {options.load}: no checkpoint there (no {LATEST}): "
            f"{load_advice(options.load)}. To begin without a checkpoint add --allow-fresh-start"
        )

    def fault_of(step: Path) -> str | None:
        # A rank may be refused a read, which is no fault of the step: all ranks stop.
        found = parallel.together(
            "--load", lambda: step_fault(step, rank=parallel.rank, size=parallel.world_size)
        )
        return next(filter(None, parallel.gathered(found)), None)

    step, notices = newest_good_step(
        root,
        there,
        fault_of,
        fallback=not options.no_load_fallback,
        again=(listed() for _ in range(MOST_LISTED)),
    )
    saved = parallel.together("--load", lambda: SavedStep(step))
    return Start(
        saved=saved,
        progress=NO_PROGRESS if options.finetune else saved.metadata.progress,
        notices=notices,
        weights_only=options.finetune,
    )


def _pretrained(options: CheckpointConfig, parallel: ParallelState) -> Start | None:
    """Returns the start from the weights of --pretrained-checkpoint, if it is given."""
    if options.pretrained_checkpoint is None:
        return None
    there = replace(
        options,
        load=options.pretrained_checkpoint,
        pretrained_checkpoint=None,
        finetune=True,
        allow_fresh_start=False,
    )
    start = find_start(there, parallel)
    if start.saved is None:
        raise InputError(
            f"--pretrained-checkpoint {options.pretrained_checkpoint}: no checkpoint there: give "
            "the folder that --save of its run named"
        )
    return start


def find_step(load: str) -> tuple[SavedStep, tuple[str, ...]]:
    """Returns the checkpoint that a tool reads, the newest good one, and notices (FoundStep).

    Its checksums are verified. Raises InputError if there is none.
    """
    root = Path(load)
    if os.path.lexists(root / LATEST):
        regular_path(root / LATEST)  # a run would do without it, and warn
    there = candidates(root)
    if not there.steps:
        raise InputError(
            f"--load {load}: no checkpoint there ({there.fault or f'no {LATEST}'}): "
            f"{load_advice(load)}"
        )
    again = (candidates(root) for _ in range(MOST_LISTED))
    step, notices = newest_good_step(root, there, step_fault, fallback=True, again=again)
    return SavedStep(step), notices


def candidates(root: Path) -> Candidates:
    """Returns the steps under `root`, in the order in which a run tries them.

    Raises InputError if the checkpoint there is one of Megatron-LM.
    """
    if found := megatron_format(root):
        save = shlex.quote(f"{str(root).rstrip('/')}-converted")
        raise InputError(
            f"--load {root}: is a checkpoint of Megatron-LM, which needs a conversion first. Run\n"
            f"  {shlex.join(subcommand('convert'))} --from {found} --to megatron-lite "
            f"--load {shlex.quote(str(root))} --save {save}\n"
            f"  and then --load {save}"
        )
    try:  # before the steps are listed, so that a step that a run saves meanwhile is among them
        newest, fault = int(pointed_step(root).stem.removeprefix("iter_")), None
    except InputError as error:
        newest, fault = 0, str(error)
    steps = saved_steps(root)[::-1]
    if not steps:
        return Candidates(fault if (root / LATEST).exists() else None, [], [])
    if not fault and newest not in steps:  # a run has deleted it meanwhile
        fault = f"{root / LATEST}: names iteration {newest}, which is gone"
    manifests = {step: Manifest.read_or_empty(saved_step(root, step)) for step in steps}
    last = max(steps, key=lambda step: (manifests[step].start, step))
    if fault:
        course = _course_of(last, manifests)  # the other steps are a last resort
        return Candidates(fault, sorted(steps, key=course.__contains__, reverse=True), [])
    notices = []
    saved = saved_step(root, last)
    if (
        manifests[last].start > manifests[newest].start
        and (saved / MANIFEST).stat().st_mtime_ns > (root / LATEST).stat().st_mtime_ns
    ):
        notices.append(
            f"warning: {root / LATEST}: not followed, because a later start has saved {saved} since"
        )
        newest = last
    course = _course_of(newest, manifests)
    left = [saved_step(root, step).name for step in reversed(steps) if step not in course]
    if left:
        notices.append(
            f"{root}: these do not lead to iteration {newest}, and are not used: {', '.join(left)}"
        )
    return Candidates(None, course, notices)


def pointed_step(root: Path, *others: str) -> Path:
    """Returns the folder that the pointer names: that of an iteration, or one of the `others`.

    Raises InputError if the pointer is missing or names no folder.
    """
    pointer = root / LATEST
    text = read_input(pointer, 32).decode(errors="replace").strip()
    if text not in others and not re.fullmatch(r"\d{1,9}", text):
        raise InputError(
            f"{pointer}: expected {' or '.join(('an iteration number', *others))}, found {text!r}"
        )
    step = root / text if text in others else saved_step(root, int(text))
    if not step.is_dir():
        raise InputError(f"{pointer}: names {text}, but {step.name} does not exist")
    return step


def _course_of(newest: int, manifests: Mapping[int, Manifest]) -> list[int]:
    """Returns the step and those that led to it, newest first, as `manifests` are.

    A step without a number, or without a manifest that can be read, may be one of them.
    """
    course, start, limit = [], 0, newest
    for step, manifest in manifests.items():
        if step <= newest and (manifest.start in (0, start) or step <= limit):
            course.append(step)
            if manifest.start:
                start, limit = manifest.start, manifest.started_at
    return course


def newest_good_step(
    root: Path,
    there: Candidates,
    fault_of: Callable[[Path], str | None],
    *,
    fallback: bool,
    again: Iterable[Candidates] = (),
) -> FoundStep:
    """Returns the first candidate without a fault.

    fault_of: returns what is wrong with a step, or None.
    fallback: whether to go on to the next candidate after a fault.
    again: a generator that lists the candidates anew, for a step that is deleted meanwhile.
    Raises InputError if no candidate is good, or if one has a fault and `fallback` is false.
    """
    faults = [there.fault] if there.fault else []
    for number in there.steps:
        if faults and not fallback:
            break
        step = saved_step(root, number)
        if fault := fault_of(step):
            if fault.endswith(GONE) and (newer := next(iter(again), None)):
                return newest_good_step(root, newer, fault_of, fallback=fallback, again=again)
            faults.append(fault)
            continue
        if faults:
            faults.append(f"going on from the newest good checkpoint instead, {step.name}")
        return FoundStep(step, (*there.notices, *(f"warning: {one}" for one in faults)))
    shown = "\n  ".join(faults[:MOST_REPORTED])
    advice = "restore what is damaged" + (
        "" if fallback else ", or leave out --no-load-fallback to use an earlier checkpoint"
    )
    raise InputError(f"--load {root}: no good checkpoint: {advice}\n  {shown}")


def step_fault(step: Path, *, rank: int = 0, size: int = 1) -> str | None:
    """Returns why a step cannot be relied on; None if it holds what was written.

    Raises OSError if the system refuses to read a file, which says nothing about the step.
    rank, size: this call reads and checks the contents of one rank's part of the files.
    """
    try:
        manifest = Manifest.read(step)
        if f"iter_{manifest.iteration:07d}" != step.stem:
            return f"{step}: the manifest is that of iteration {manifest.iteration}"
        manifest.check_sizes(step)
        # The files, the largest first, go to the ranks in turn: all read about as many bytes.
        largest_first = sorted(manifest.files.items(), key=lambda one: (-one[1].bytes, one[0]))
        for name, row in largest_first[rank::size]:
            if row_of(step / name) != row:
                return (
                    f"{step / name}: its checksum is not the one in {MANIFEST}: the checkpoint is "
                    "damaged"
                )
        saved = SavedStep(step)
        metadata, config = saved.metadata, saved.config
        if metadata.progress.iteration != manifest.iteration:
            return (
                f"{step / METADATA}: progress.iteration must be that of the step, "
                f"{manifest.iteration} (got {metadata.progress.iteration}): the checkpoint is "
                "damaged"
            )
        # Each rank has a random-number file of its own, so a step has at least as many files as
        # ranks. The check comes before expected_files, which lists a name for every rank.
        if metadata.world_size > len(manifest.files):
            return (
                f"{step / METADATA}: describes {metadata.world_size} ranks, but the manifest lists "
                f"{len(manifest.files)} files: the checkpoint is damaged"
            )
        missing = sorted(metadata.expected_files() - set(manifest.files))
        if missing:
            return f"{step}: {missing[0]} is not in the manifest"
        counted = parameter_count(config.model, config.tokenizer.true_vocab_size)
        counted += config.model.num_expert_biases
        held = sum(math.prod(layout.spec.global_shape) for layout in saved.layouts.values())
        if counted != held:
            return (
                f"{step / CONFIG}: describes a model of {counted} weights, but the step holds "
                f"{held}: the checkpoint is damaged"
            )
    except (InputError, FileNotFoundError) as error:
        return str(error) if step.is_dir() else f"{step}{GONE}"
    return None


ITERATION = re.compile(r"iter_\d{7,9}|release")
RANK_FOLDER = re.compile(r"mp_rank_\d{2}(_\d{3}){0,2}")
# Of torch's distributed checkpoints.
DIST_METADATA = ".metadata"


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


def load_advice(load: str) -> str:
    """Returns what to do about a folder without a checkpoint, as the end of a message."""
    root, advice = Path(load), "give the folder that --save of the run named"
    if not root.is_dir():
        return f"{'it is a file' if root.exists() else 'no such folder'}: {advice}"
    step = STEP_NAME.fullmatch(root.resolve().name)
    if step and (root.resolve().parent / LATEST).is_file():
        return f"it is the checkpoint of iteration {int(step[1])}: give --load {root.parent}"
    inside = sorted(pointer.parent for pointer in root.glob(f"*/{LATEST}"))
    if inside:
        more = ", ..." if len(inside) > NAMED else ""
        return f"did you mean --load {' or '.join(map(str, inside[:NAMED]))}{more}?"
    if (root / "config.json").is_file():
        words = ("--from", "hf", "--to", "megatron-lite", "--load", load, "--save", "NEW_FOLDER")
        return (
            "it looks like a model of Hugging Face, which this command converts: "
            f"{shlex.join([*subcommand('convert'), *words])}"
        )
    return advice
