"""The JSON files of a step.

A reader needs metadata.json and parameters_pp*.json to read its tensors. The progress is part of
them. With the weights, the optimizer states and the random-number streams it is all that resuming
needs.

manifest.json has size and SHA-256 of every file of a step, and which start saved the step. It is
written when all the other files are on the disk. A run reads back every file that the manifest
lists before it uses a step. Thus a step either holds what was written, bit for bit, or the run
refuses it.

Every start that takes a directory has a number, above the numbers of all earlier starts (lock.py).
A start goes on from a step of an earlier one, and leaves the later steps of that start behind:

    start 1    2    4    6 (left)      steps 5 and 8 of start 2 have started_at 4: steps 2 and 4
    start 2              5    8        of start 1 led to them, step 6 of start 1 did not
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_lite.config import checks
from megatron_lite.config.checks import InputError, input_faults
from megatron_lite.config.input_file import input_size, read_input
from megatron_lite.config.run import RunConfig
from megatron_lite.config.setting import from_plain
from megatron_lite.data.durable_files import checksum_of
from megatron_lite.optim.loss_scale import LossScaleState, MeanLossState
from megatron_lite.optim.lr_schedule import LrSchedule
from megatron_lite.parallel.parameter_spec import ParameterSpec

from .step_files import (
    CONFIG,
    METADATA,
    MOST_ITERATIONS,
    Progress,
    parameters_file,
    rng_file,
    shard_file,
)

AXES = ("tp_size", "dp_size", "pp_size", "cp_size")
MOST_RANKS = 2**20
MOST_UPDATES = 10**9 - 1
LONGEST_LINE = 400
PARTS = ("optimizer", "rng")
MOST_DIMS = 8
MOST_ELEMENTS = 2**48
MOST_BLOCKS = 64
FIELDS = ("global_shape", "tp_dim", "tp_blocks", "padded_length")


def saved_spec(values: object, name: str, tp_size: int) -> ParameterSpec:
    """Reads the FIELDS of the named parameter.

    tp_size: the number of TP ranks over which the parameter was split.
    Raises ValueError on a split that no run has.
    """
    where = f"parameter {checks.quoted(name)}"
    spec: ParameterSpec = from_plain(ParameterSpec, values, where)
    try:
        _check_split(spec, tp_size)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return spec


def _check_split(spec: ParameterSpec, tp_size: int) -> None:
    shape, dim, blocks, padded = (getattr(spec, field) for field in FIELDS)
    is_large = len(shape) > MOST_DIMS or math.prod(shape) > MOST_ELEMENTS
    if is_large or min(shape, default=0) < 0:
        raise ValueError(
            f"global_shape must have at most {MOST_DIMS} dims and {MOST_ELEMENTS} elements "
            f"(got {checks.quoted(shape)})"
        )
    checks.as_whole(blocks, "tp_blocks", 1, MOST_BLOCKS)
    if dim is None and (blocks, padded) != (1, None):
        raise ValueError(
            f"without a tp_dim there is one block and no padded_length (got {blocks}, {padded})"
        )
    if dim is not None:
        length = shape[checks.as_whole(dim, "tp_dim", 0, len(shape) - 1)]
        if padded is not None:
            checks.as_whole(padded, "padded_length", length, MOST_ELEMENTS)
            checks.as_whole(blocks, "tp_blocks with a padded_length", 1, 1)
    spec.local_shape(tp_size)  # its ValueError is about a split that is not even


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The progress of a saved run, its layout over ranks, and the data that it read.

    tp_size, dp_size, pp_size, cp_size: the sizes of the parallel axes.
    num_updates: how many updates the optimizer had made.
    loss_scale, mean_loss: the states of the loss scale and of the spike detection; None without.
    data: the identity of the data (data/datasets.py).
    schedule: the learning-rate schedule of the run; None in a checkpoint of an older version.
    computed_on: the processor of rank 0 and its libraries, which decide the low bits of the results
        (training/summary.py); "" in a converted checkpoint, or one of an older version.
    missing: what a converted step does not hold, of "optimizer" (the optimizer states) and "rng"
        (the random-number streams). A run that loads it starts these anew.
    """

    progress: Progress
    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int
    num_updates: int
    loss_scale: LossScaleState | None = None
    mean_loss: MeanLossState | None = None
    data: Mapping[str, Any]
    schedule: LrSchedule | None = None
    computed_on: str = ""
    missing: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Returns the text of metadata.json."""
        values = {"format": FORMAT, **asdict(self)}
        for name in ("computed_on", "missing"):
            if not values[name]:
                del values[name]
        return json.dumps(values, indent=1)

    @property
    def world_size(self) -> int:
        """The number of ranks that saved the step."""
        return self.tp_size * self.dp_size * self.pp_size * self.cp_size

    def expected_files(self) -> set[str]:
        """Returns the names of all files of the step except the manifest."""
        shards = {
            shard_file(kind, pp_rank, tp_rank, self.tp_size)
            for kind in ("model", *({"optimizer"} - set(self.missing)))
            for pp_rank in range(self.pp_size)
            for tp_rank in range(self.tp_size)
        }
        streams = range("rng" not in self.missing and self.world_size)
        layouts = map(parameters_file, range(self.pp_size))
        return {CONFIG, METADATA, *shards, *layouts, *map(rng_file, streams)}

    @classmethod
    def read(cls, step: Path) -> Metadata:
        """Reads a step's metadata. Raises InputError if it is damaged or of another format."""
        path = step / METADATA
        with damaged(path):
            values = parse_formatted(path)
            found: Metadata = from_plain(cls, values, METADATA)
            for axis in AXES:
                checks.as_whole(getattr(found, axis), axis, 1, MOST_RANKS)
            checks.as_whole(found.world_size, " x ".join(AXES), 1, MOST_RANKS)
            checks.as_whole(found.num_updates, "num_updates", 0, MOST_UPDATES)
            text = found.computed_on
            if len(text) > LONGEST_LINE or not f"{text} ".isprintable():
                raise ValueError(f"computed_on must be one line (got {checks.quoted(text)})")
            found.progress.check()
            if not {*found.missing} <= {*PARTS}:
                raise ValueError(
                    f"missing must name parts of {', '.join(PARTS)} (got "
                    f"{checks.quoted(found.missing)})"
                )
        return found


def layouts_to_json(specs: Mapping[str, ParameterSpec]) -> str:
    """Returns the text of the parameters_pp*.json of a pipeline rank with these parameters."""
    return json.dumps(
        {name: {field: getattr(one, field) for field in FIELDS} for name, one in specs.items()},
        indent=1,
    )


def read_config(step: Path) -> RunConfig:
    """Returns the configuration of the run that saved a step.

    Weights do not depend on the recomputation. Therefore recompute settings that this version
    refuses, such as a rule that could never apply, are left out. Raises InputError if the file
    cannot be read or breaks any other rule.
    """
    path = step / CONFIG
    try:
        text = read_input(path, MOST_BYTES).decode()
        values = checks.parse_object(text)
        try:
            return RunConfig.from_json(text)
        except ValueError:
            if values.pop("recompute", None) is None:
                raise
            return RunConfig.from_json(json.dumps(values))
    except InputError:
        raise
    except (ValueError, OverflowError, RecursionError) as error:
        raise InputError(
            f"{path}: cannot be read ({error}): the checkpoint is damaged or of another version"
        ) from error


MANIFEST = "manifest.json"
FORMAT = 3
MOST_BYTES = 2**26  # the longest text that is parsed. A manifest has about 130 bytes per file.
MOST_FILE_BYTES = 2**50
MOST_STARTS = 2**31


@dataclass(frozen=True)
class FileRow:
    """The size and the checksum of one file. Raises ValueError if one is malformed."""

    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        checks.as_whole(self.bytes, "bytes", 0, MOST_FILE_BYTES)
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError(
                f"sha256 must have 64 hexadecimal digits (got {checks.quoted(self.sha256)})"
            )


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json. Raises ValueError if a number or a file's name is malformed.

    iteration: the iteration of the step.
    files: a row for each file of the step, by the file's name.
    start: the number of the start that saved the step; 0 if it has none, as in other versions.
    started_at: the iteration from which that start went on. No later step of an earlier start led
    to this one.
    """

    iteration: int
    files: Mapping[str, FileRow]
    start: int = 0
    started_at: int = MOST_ITERATIONS

    def __post_init__(self) -> None:
        for name in ("iteration", "started_at"):
            checks.as_whole(getattr(self, name), name, 0, MOST_ITERATIONS)
        checks.as_whole(self.start, "start", 0, MOST_STARTS)
        for name in self.files:
            if not re.fullmatch(r"\w[\w.-]{0,250}", name, re.ASCII):
                raise ValueError(
                    "the name of a file must have letters, digits, '_', '-' and '.' alone (got "
                    f"{checks.quoted(name)})"
                )

    def to_json(self) -> str:
        """Returns the text of manifest.json."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def read(cls, step: Path) -> Manifest:
        """Reads a step's manifest.

        Raises InputError if it is missing, damaged or of another format.
        """
        path = step / MANIFEST
        with damaged(path):
            # Manifests of other versions have a course.
            found: Manifest = from_plain(cls, parse_formatted(path), MANIFEST, ["course"])
            return found

    @classmethod
    def read_or_empty(cls, step: Path) -> Manifest:
        """Reads a step's manifest. Returns an empty one, without a number, if it is not whole."""
        try:
            return cls.read(step)
        except InputError:
            return cls(0, {})

    def check_sizes(self, step: Path) -> None:
        """Raises InputError if a file is missing, is no regular file, or has another size."""
        for name, row in sorted(self.files.items()):
            found = input_size(step / name)
            if found != row.bytes:
                raise InputError(
                    f"{step / name}: {found} bytes, but {MANIFEST} says {row.bytes}: the "
                    "checkpoint is damaged"
                )


def is_complete(step: Path) -> bool:
    """Returns whether every file of the step exists and has its full size."""
    try:
        Manifest.read(step).check_sizes(step)
    except InputError:
        return False
    return True


def row_of(path: Path) -> FileRow:
    """Returns the size and checksum of a file (durable_files.checksum_of)."""
    return FileRow(*checksum_of(path))


def parse_json(path: Path) -> checks.Values:
    """Returns the JSON object that a file holds.

    Raises InputError if the file cannot be read or is too long, and ValueError on any other text.
    """
    return checks.parse_object(read_input(path, MOST_BYTES))


def parse_formatted(path: Path) -> checks.Values:
    """Returns the JSON object that a file holds, without its format number, which is checked.

    Raises InputError if the file cannot be read or is not of this version's format, and ValueError
    if it is damaged.
    """
    values = parse_json(path)
    found = values.pop("format", None)
    if type(found) is not int or found != FORMAT:
        raise InputError(
            f"{path}: format {checks.quoted(found)}, but this version reads format {FORMAT}"
        )
    return values


def damaged(path: Path) -> AbstractContextManager[None]:
    """Returns a context that turns a ValueError about a wrong value into an error of the file."""
    return input_faults(f"{path}: cannot be read (", "): the checkpoint is damaged")
