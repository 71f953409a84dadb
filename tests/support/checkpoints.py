"""Damage to checkpoints, and what makes it look like what was written."""

from __future__ import annotations

from pathlib import Path

from megatron_lite.checkpointing.manifest import MANIFEST, Manifest, row_of


def sign(step: Path) -> None:
    """Writes a manifest of the files as they are now: what a writer with other contents would have left."""
    rows = {path.name: row_of(path) for path in step.iterdir() if path.name != MANIFEST}
    (step / MANIFEST).write_text(Manifest(Manifest.read(step).iteration, rows).to_json())


def flip_bit(path: Path, bit: int) -> None:
    """Changes one bit of a file, counted from its start."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
