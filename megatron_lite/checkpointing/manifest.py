"""manifest.json: size and SHA-256 of every file of a step, and which start saved the step.

The manifest is written when all the other files are on the disk. A run reads back every file that
the manifest lists before it uses a step. Thus a step either holds what was written, bit for bit, or
the run refuses it.

Every start that takes a directory has a number, above the numbers of all earlier starts (lock.py).
A start goes on from a step of an earlier one, and leaves the later steps of that start behind:

    start 1    2    4    6 (left)      steps 5 and 8 of start 2 have started_at 4: steps 2 and 4
    start 2              5    8        of start 1 led to them, step 6 of start 1 did not
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.checkpointing.step_files import MOST_ITERATIONS
from megatron_lite.config import plain
from megatron_lite.config.checks import InputError, input_faults
from megatron_lite.config.input_file import input_size, read_input
from megatron_lite.data.durable_files import checksum_of

MANIFEST = "manifest.json"
FORMAT = 3
MOST_BYTES = 2**26  # the longest text that is parsed. A manifest has about 130 bytes per file.
MOST_FILE_BYTES = 2**50
MOST_STARTS = 2**31


class FileRow(NamedTuple):
    """The size and the checksum of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

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

    def to_json(self) -> str:
        """Returns the text of manifest.json."""
        return json.dumps(
            {
                "format": FORMAT,
                "iteration": self.iteration,
                "start": self.start,
                "started_at": self.started_at,
                "files": rows_to_plain(self.files),
            },
            indent=1,
        )

    @classmethod
    def read(cls, step: Path) -> Manifest:
        """Reads a step's manifest.

        Raises InputError if it is missing, damaged or of another format.
        """
        path = step / MANIFEST
        values = {"start": 0, "started_at": MOST_ITERATIONS, **parse_formatted(path)}
        with damaged(path):
            return cls(
                plain.whole(values, "iteration", 0, MOST_ITERATIONS),
                rows_from_plain(plain.field(values, "files")),
                plain.whole(values, "start", 0, MOST_STARTS),
                plain.whole(values, "started_at", 0, MOST_ITERATIONS),
            )

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

    def check_contents(self, step: Path, names: Iterable[str]) -> None:
        """Reads the named files. Raises InputError if one does not hold what was written."""
        for name in names:
            if row_of(step / name, limit=self.files[name].bytes) != self.files[name]:
                raise InputError(
                    f"{step / name}: its checksum is not the one in {MANIFEST}: the checkpoint "
                    "is damaged"
                )

    def files_of_rank(self, rank: int, size: int) -> list[str]:
        """Returns the files that one of `size` ranks checks; all ranks have about as many bytes."""
        # The files, the largest first, go to the ranks in turn.
        return sorted(self.files, key=lambda name: (-self.files[name].bytes, name))[rank::size]


def is_complete(step: Path) -> bool:
    """Returns whether every file of the step exists and has its full size."""
    try:
        Manifest.read(step).check_sizes(step)
    except InputError:
        return False
    return True


def row_of(path: Path, *, limit: int | None = None) -> FileRow:
    """Returns the size and checksum of a file (durable_files.checksum_of)."""
    return FileRow(*checksum_of(path, limit=limit))


def rows_to_plain(rows: Mapping[str, FileRow]) -> dict[str, dict[str, object]]:
    """Returns the rows as a JSON object."""
    return {name: row._asdict() for name, row in sorted(rows.items())}


def rows_from_plain(values: object) -> dict[str, FileRow]:
    """Reads the rows that `rows_to_plain` wrote.

    Raises ValueError if a name is a path, or if a size or a checksum is malformed.
    """
    rows = {}
    for name, row in plain.as_object(values, "files").items():
        row = plain.as_object(row, f"files[{plain.quoted(name)}]")
        size, sha256 = plain.whole(row, "bytes", 0, MOST_FILE_BYTES), plain.field(row, "sha256")
        if not re.fullmatch(r"\w[\w.-]{0,250}", name, re.ASCII) or not (
            isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256)
        ):
            raise ValueError(
                "a file must have a name of letters, digits, '_', '-' and '.', and a sha256 of 64 "
                f"hexadecimal digits (got {plain.quoted(name)}, {plain.quoted(sha256)})"
            )
        rows[name] = FileRow(size, sha256)
    return rows


def parse_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object that a file holds.

    Raises InputError if the file cannot be read or is too long, and ValueError on any other text.
    """
    return plain.parse_object(read_input(path, MOST_BYTES))


def parse_formatted(path: Path) -> dict[str, Any]:
    """Returns the JSON object that a file holds, after a check of its format number.

    Raises InputError if the file cannot be read, is damaged, or is not of this version's format.
    """
    with damaged(path):
        values = parse_json(path)
        found = plain.field(values, "format")
    if type(found) is not int or found != FORMAT:
        raise InputError(
            f"{path}: format {plain.quoted(found)}, but this version reads format {FORMAT}"
        )
    return values


def damaged(path: Path) -> AbstractContextManager[None]:
    """Returns a context that turns a ValueError about a wrong value into an error of the file."""
    return input_faults(f"{path}: cannot be read (", "): the checkpoint is damaged")
