"""Writes safetensors files tensor by tensor, so that only one tensor is in memory.

    8 bytes: length of the header | the header, JSON with spaces at its end | the tensors' bytes

The header has the name, dtype, shape and place of each tensor. Readers map the file and use tensors
where they lie, so the widest elements come first: then each tensor begins at a multiple of its
element size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from megatron_lite.checkpointing.shards import FLOATS

ALIGNMENT = 8
NAMES = {dtype: name for name, dtype in FLOATS.items()}


Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape, by name


@contextmanager
def safetensors_files(
    folder: Path, tensors: Mapping[str, Tensors], metadata: Mapping[str, str] | None = None
) -> Iterator[Callable[[str, str, Tensor], None]]:
    """Yields `write(file, name, tensor)` for new files in a folder. The caller syncs them.

    tensors: what each file will hold, by the file's name. Each tensor must be written once.
    metadata: texts for the headers.
    """
    places: dict[tuple[str, str], tuple[IO[bytes], int]] = {}
    with ExitStack() as stack:
        for path, own in tensors.items():
            header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
            starts, stop = {}, 0
            for name, (dtype, shape) in sorted(own.items(), key=lambda one: -one[1][0].itemsize):
                starts[name] = start = stop
                stop += math.prod(shape) * dtype.itemsize
                offsets = [start, stop]
                header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": offsets}
            text = json.dumps(header, separators=(",", ":")).encode()
            text = text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)
            file = stack.enter_context((folder / path).open("wb"))
            data = file.write(len(text).to_bytes(8, "little") + text)
            places |= {(path, name): (file, data + start) for name, start in starts.items()}

        def write(path: str, name: str, tensor: Tensor) -> None:
            file, start = places[path, name]
            file.seek(start)
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            file.write(flat.numpy().data)

        yield write
