"""Writes a safetensors file tensor by tensor, so that only one tensor is in memory.

    8 bytes: length of the header | the header, JSON with spaces at its end | the tensors' bytes

The header has the name, dtype, shape and place of each tensor. Readers map the file and use tensors
where they lie, so the widest elements come first: then each tensor begins at a multiple of its
element size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpointing.shards import FLOATS

ALIGNMENT = 8
NAMES = {dtype: name for name, dtype in FLOATS.items()}


Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape, by name


@contextmanager
def safetensors_files(
    folder: Path, tensors: Mapping[str, Tensors], metadata: Mapping[str, str] | None = None
) -> Iterator[Mapping[str, SafetensorsFile]]:
    """Yields new files to write into, by their names. The caller syncs them.

    tensors: what each file will hold, by the file's name.
    metadata: texts for the headers.
    """
    with ExitStack() as stack:
        files = {}
        for name, own in tensors.items():
            files[name] = SafetensorsFile(folder / name, own, metadata)
            stack.callback(files[name].close)
        yield files


class SafetensorsFile:
    """A safetensors file that is being written.

    tensors: the dtype and the shape of every tensor, by name. Each must be written once.
    metadata: texts for the header.
    """

    def __init__(
        self, path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None
    ) -> None:
        header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
        self._starts: dict[str, int] = {}
        stop = 0
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda one: -one[1][0].itemsize):
            self._starts[name] = start = stop
            stop += math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [start, stop]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)
        self._file = path.open("wb")
        self._data = self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor at its place."""
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._file.seek(self._data + self._starts[name])
        self._file.write(flat.numpy().data)

    def close(self) -> None:
        """Ends the writing."""
        self._file.close()
