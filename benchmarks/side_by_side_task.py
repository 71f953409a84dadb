"""The blocks of benchmarks/side_by_side.py, and the notes that tell which contestant failed."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.engines import PRESETS, Setting, Shape
from benchmarks.side_by_side_engines import LlamaSetting, libraries_of

CPU = torch.device("cpu")
SHAPES = {
    "8x512": PRESETS["medium"],
    "12x768": Shape(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        seq_length=512,
        batch_size=1,
        vocab_size=50304,
    ),
    "4x2048": Shape(
        num_layers=4,
        hidden_size=2048,
        num_attention_heads=16,
        seq_length=512,
        batch_size=1,
        vocab_size=32768,
    ),
    "quick": PRESETS["small"],
    "tiny": PRESETS["tiny"],
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """One setting. threads: of each rank."""

    family: str
    shape: str
    dtype: str
    threads: int
    tp_size: int
    sequence_parallel: bool
    rounds: int
    compiled: bool

    @property
    def title(self) -> str:
        """The setting in words."""
        parallel = f"TP {self.tp_size}{' + SP' if self.sequence_parallel else ''}"
        return f"{self.family} {self.shape}, {self.dtype}, {self.threads} thread(s), {parallel}"

    @property
    def libraries(self) -> dict[str, str]:
        """The name of every contestant, and the library that builds it."""
        return libraries_of(
            self.family,
            tp_size=self.tp_size,
            sequence_parallel=self.sequence_parallel,
            compiled=self.compiled,
            has_chunks=self.setting().loss_chunk_size is not None,
        )

    def setting(self) -> Setting:
        """Returns what the engines are built from."""
        kind = Setting if self.family == "gpt" else LlamaSetting
        return kind(shape=SHAPES[self.shape], device=CPU, dtype=self.dtype, dropout=0.0)


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of one start of a block.

    names: the contestants to measure beside ours; None: all. without: contestants and libraries
    that failed before. minutes: the time limit; None: no limit. The rounds end early at the limit,
    but at least one round counts. folder: where the ranks write their notes and rank 0 the result.
    """

    block: Block
    folder: str
    names: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    minutes: float | None = None

    def wants(self, name: str) -> bool:
        """Returns whether to build the contestant, or the library, of this name."""
        is_named = self.names is None or name in self.names
        return name not in self.without and (is_named or name not in self.block.libraries)

    @property
    def result(self) -> Path:
        """The file of the result."""
        return Path(self.folder) / "result.json"

    def to_json(self) -> str:
        """Returns the task as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Returns the task of a text."""
        fields = json.loads(text)
        names = fields["names"]
        return cls(
            block=Block(**fields["block"]),
            folder=fields["folder"],
            names=None if names is None else tuple(names),
            without=tuple(fields["without"]),
            minutes=fields["minutes"],
        )


class Culprit(NamedTuple):
    """A contestant, or a library, that ended a block, and how."""

    name: str
    reason: str


class Notes:
    """The files in which the ranks of a block note who runs, and who failed first."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder, self._rank, self._running = Path(folder), rank, ""

    def __call__(self, name: str) -> None:
        """Notes that the contestant or the library runs from now on."""
        if name != self._running:
            self._running = name
            (self._folder / f"running-{self._rank}").write_text(name)

    def failed(self, error: BaseException) -> None:
        """Notes the error. The first rank to note one wins, since the others fail because of it."""
        text = str(error).strip() or "no message"
        reason = f"{type(error).__name__}: {text.splitlines()[0][:200]}"
        own = self._folder / f"failed-{self._rank}"
        own.write_text(json.dumps([self._running, reason]))
        with suppress(FileExistsError):
            os.link(own, self._folder / "failed")

    @staticmethod
    def culprit(folder: str, status: int) -> Culprit | None:
        """Returns who ended the block, or None if nobody ran yet. status: of the process."""
        with suppress(OSError):
            return Culprit(*json.loads((Path(folder) / "failed").read_text()))
        with suppress(OSError):
            name = (Path(folder) / "running-0").read_text()
            how = f"signal {-status}" if status < 0 else f"status {status}"
            return Culprit(name, f"the process ended with {how}") if name else None
        return None
