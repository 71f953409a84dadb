"""Writes a safetensors file tensor by tensor, so that only one tensor is in memory.

    8 bytes: length of the header | the header, JSON with spaces at its end | the tensors' bytes

The header has the name, dtype, shape and place of each tensor. It stands before the tensors, so the
writer reserves room for it and fills it in at the end. Readers map the file and use tensors where
they lie, so each begins at a multiple of its element size. Therefore a tensor that would leave the
next one at an odd place waits in memory until the end. Such a tensor has an odd number of 16-bit or
32-bit elements, and is rare.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

ALIGNMENT = 8
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
LARGEST_OFFSET = 2**63


class SafetensorsFile:
    """A safetensors file that is being written.

    It is complete at the end of its context. After an error it stays without a header, and cannot
    be read.

    shapes: the shape of every tensor that may be written, by name.
    metadata: texts for the header.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._shapes, self._metadata = dict(shapes), dict(metadata or {})
        self._entries: dict[str, dict[str, object]] = {}
        self._waiting: list[tuple[str, Tensor]] = []
        # The dtypes and the places are not known yet, so each entry has the longest of them.
        longest = {
            name: _entry("BF16", shape, LARGEST_OFFSET, LARGEST_OFFSET)
            for name, shape in self._shapes.items()
        }
        text = self._header(longest)
        self._room = -(-len(text) // ALIGNMENT) * ALIGNMENT
        self._file = path.open("wb")
        self._file.write(bytes(8 + self._room))
        self._offset = 0

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._file.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor, in its own dtype."""
        assert tuple(tensor.shape) == self._shapes[name], (name, tensor.shape)
        if tensor.numel() * tensor.element_size() % ALIGNMENT:
            self._waiting.append((name, tensor.detach().clone()))
        else:
            self._write(name, tensor)

    def _write(self, name: str, tensor: Tensor) -> None:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._file.write(flat.numpy().data)
        stop = self._offset + flat.numel()
        self._entries[name] = _entry(NAMES[tensor.dtype], tuple(tensor.shape), self._offset, stop)
        self._offset = stop

    def _finish(self) -> None:
        # The widest elements first: then each tensor begins at a multiple of its element size.
        for name, tensor in sorted(self._waiting, key=lambda one: -one[1].element_size()):
            self._write(name, tensor)
        text = self._header(self._entries)
        assert len(text) <= self._room
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + text.ljust(self._room))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _header(self, entries: Mapping[str, object]) -> bytes:
        known = {"__metadata__": self._metadata} if self._metadata else {}
        return json.dumps({**known, **entries}, separators=(",", ":")).encode()


def _entry(dtype: str, shape: tuple[int, ...], start: int, stop: int) -> dict[str, object]:
    assert math.prod(shape) >= 0
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
