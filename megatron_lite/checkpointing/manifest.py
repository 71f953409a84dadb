"""manifest.json: size and SHA-256 of every file of a step, written when all of them are on the disk.

What it lists is read back before a run relies on it, so that a step is either what was written, bit for bit, or refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_lite.checkpointing.files import METADATA, read_bounded
from megatron_lite.config.checks import InputError

MANIFEST = "manifest.json"
FORMAT = 3
MOST_BYTES = 2**26  # of a text that is parsed: a manifest has about 130 bytes a file
CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class FileRow:
    """What a file holds."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A row for each file of a step, by its name."""

    iteration: int
    files: Mapping[str, FileRow]

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps({"format": FORMAT, "iteration": self.iteration, "files": rows_to_plain(self.files)}, indent=1)

    @classmethod
    def read(cls, step: Path) -> Manifest:
        """InputError where it is missing, damaged or of another format."""
        path = step / MANIFEST
        if not path.exists() and (step / METADATA).exists():
            _refuse_other_format(step / METADATA)
        try:
            values = parse_json(path)
            if values["format"] != FORMAT:
                raise InputError(f"{path}: format {values['format']}, but this version reads format {FORMAT}")
            return cls(iteration=int(values["iteration"]), files=rows_from_plain(values["files"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path}: cannot be read ({error!r}): the checkpoint is damaged") from error

    def check_sizes(self, step: Path) -> None:
        """InputError where a file is missing or has another size."""
        for name, row in sorted(self.files.items()):
            try:
                found = (step / name).stat().st_size
            except OSError as error:
                raise InputError(f"{step / name}: cannot be read ({error.strerror}): the checkpoint is incomplete") from error
            if found != row.bytes:
                raise InputError(f"{step / name}: {found} bytes, but {MANIFEST} says {row.bytes}: the checkpoint is damaged")

    def check_contents(self, step: Path, names: Iterable[str]) -> None:
        """Reads these files. InputError where one does not hold what was written."""
        for name in names:
            if row_of(step / name) != self.files[name]:
                raise InputError(f"{step / name}: its checksum is not the one in {MANIFEST}: the checkpoint is damaged")

    def share(self, rank: int, size: int) -> list[str]:
        """The files that one of `size` ranks checks: about as many bytes each."""
        return sorted(self.files, key=lambda name: (-self.files[name].bytes, name))[rank::size]


def is_complete(step: Path) -> bool:
    """Whether every file of the step is there with its full size."""
    try:
        Manifest.read(step).check_sizes(step)
    except InputError:
        return False
    return True


def row_of(path: Path) -> FileRow:
    """Reads a file once. InputError where it cannot be read. Lets other threads run."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    size = 0
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                size += count
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({os.strerror(error.errno or 0)}): the checkpoint is damaged") from error
    return FileRow(size, digest.hexdigest())


def rows_to_plain(rows: Mapping[str, FileRow]) -> dict[str, dict[str, object]]:
    """A JSON object."""
    return {name: asdict(row) for name, row in sorted(rows.items())}


def rows_from_plain(values: Mapping[str, Mapping[str, object]]) -> dict[str, FileRow]:
    """Reads what `rows_to_plain` wrote. ValueError on a name that is a path, a size or a checksum that is none."""
    rows = {}
    for name, row in values.items():
        size, sha256 = row["bytes"], row["sha256"]
        if not re.fullmatch(r"\w[\w.-]*", name) or type(size) is not int or size < 0 \
                or not re.fullmatch(r"[0-9a-f]{64}", str(sha256)):
            raise ValueError(f"no row of a file: {name[:80]!r}: {str(row)[:120]}")
        rows[name] = FileRow(size, str(sha256))
    return rows


def parse_json(path: Path) -> dict:
    """A JSON object. InputError where the file cannot be read or is too long; ValueError on anything else."""
    try:
        values = json.loads(read_bounded(path, MOST_BYTES))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, got {type(values).__name__}")
    return values


def _refuse_other_format(path: Path) -> None:
    try:
        found = parse_json(path).get("format")
    except ValueError:
        return
    if found != FORMAT:
        raise InputError(f"{path}: format {found}, but this version reads format {FORMAT}")
