"""manifest.json: size and SHA-256 of every file of a step.

The manifest is written when all the other files are on the disk. A run reads back every file that
the manifest lists before it uses a step. Thus a step either holds what was written, bit for bit, or
the run refuses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.checkpointing.step_files import MOST_ITERATIONS
from megatron_lite.config import plain
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import input_size, read_input
from megatron_lite.data.durable_files import checksum_of

MANIFEST = "manifest.json"
FORMAT = 3
MOST_BYTES = 2**26  # the longest text that is parsed. A manifest has about 130 bytes per file.
MOST_FILE_BYTES = 2**50


class FileRow(NamedTuple):
    """The size and the checksum of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    iteration: the iteration of the step.
    files: a row for each file of the step, by the file's name.
    """

    iteration: int
    files: Mapping[str, FileRow]

    def to_json(self) -> str:
        """Returns the text of manifest.json."""
        return json.dumps(
            {"format": FORMAT, "iteration": self.iteration, "files": rows_to_plain(self.files)},
            indent=1,
        )

    @classmethod
    def read(cls, step: Path) -> Manifest:
        """Reads a step's manifest.

        Raises InputError if it is missing, damaged or of another format.
        """
        path = step / MANIFEST
        values = parse_formatted(path)
        try:
            return cls(
                plain.whole(values, "iteration", 0, MOST_ITERATIONS),
                rows_from_plain(plain.field(values, "files")),
            )
        except ValueError as error:
            raise damaged(path, error) from error

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
    try:
        values = parse_json(path)
        found = plain.field(values, "format")
    except ValueError as error:
        raise damaged(path, error) from error
    if type(found) is not int or found != FORMAT:
        raise InputError(
            f"{path}: format {plain.quoted(found)}, but this version reads format {FORMAT}"
        )
    return values


def damaged(path: Path, error: ValueError) -> InputError:
    """Returns the error for a file with a wrong value.

    An InputError is returned unchanged, because it names a file already.
    """
    if isinstance(error, InputError):
        return error
    return InputError(f"{path}: cannot be read ({error}): the checkpoint is damaged")
