"""Damages checkpoints, and signs a damaged checkpoint as if it had been written that way."""

from dataclasses import replace

from megatron_lite.checkpointing.metadata import MANIFEST, Manifest, row_of


def sign(step):
    """Writes a manifest of the files as they are now, as a writer of these contents would do."""
    rows = {path.name: row_of(path) for path in step.iterdir() if path.name != MANIFEST}
    (step / MANIFEST).write_text(replace(Manifest.read(step), files=rows).to_json())


def flip_bit(path, bit):
    """Changes one bit of a file, counted from its start."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
