"""The tensors of a torch_dist checkpoint (DCP of torch), each as one tensor.

iter_0000040/.metadata        a pickle: the shape of each tensor, its chunks, and where they are
             __0_0.distcp     chunks, each as a file of torch.save at some byte of this one
             common.pt        what is no tensor: the arguments, the iteration, step counts
             metadata.json    the name of the format
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpointing.layout import MOST_DIMS, MOST_ELEMENTS
from megatron_lite.checkpointing.other_systems import DIST_METADATA
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import input_size, read_input
from megatron_lite.convert.megatron.pickles import (
    INERT,
    LONGEST_NAME,
    MOST_BYTES,
    Inert,
    Name,
    PickledObject,
    read_pickle,
)
from megatron_lite.convert.megatron.torch_file import (
    CALLS,
    DTYPES,
    NAMES,
    StoredTensor,
    TorchFile,
    Window,
)

COMMON = "common.pt"
DTYPE_NAMES = {str(dtype): dtype for dtype in DTYPES.values()}


class Chunk(NamedTuple):
    """A block of a tensor. offsets, sizes: its place along each dim. window: its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    window: Window


@dataclass(frozen=True)
class DistTensor:
    """One tensor of the checkpoint, in chunks. The chunks are in the order of their first rows."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    _opened: dict[int, StoredTensor] = field(default_factory=dict)  # by the id of a chunk

    def read(self, index: int | None = None) -> Tensor:
        """Returns the tensor, or its part at an index of the first dim.

        Raises InputError if the chunks do not cover it, or if one has another shape.
        """
        # Rows [first, last) of the first dim are wanted. A tensor without dims counts as one row.
        first = 0 if index is None else index
        last = (self.shape[0] if self.shape else 1) if index is None else index + 1
        # If one chunk is the whole tensor, its rows are read without a copy into another tensor.
        if self.shape and len(self.chunks) == 1 and self.chunks[0].sizes == self.shape:
            only = self._saved(self.chunks[0]).rows(first, last - first).read()
            return only if index is None else only[0]
        whole = torch.empty((last - first, *self.shape[1:]) if self.shape else (), dtype=self.dtype)
        covered = 0
        for chunk in self._near(first, last):
            start, stop = first, last
            if self.shape:
                start = max(first, chunk.offsets[0])
                stop = min(last, chunk.offsets[0] + chunk.sizes[0])
            if start >= stop:
                continue
            saved, place = self._saved(chunk), whole
            if self.shape:
                saved = saved.rows(start - chunk.offsets[0], stop - start)
                place = place.narrow(0, start - first, stop - start)
            part = saved.read()
            for dim in range(1, len(self.shape)):
                place = place.narrow(dim, chunk.offsets[dim], chunk.sizes[dim])
            place.copy_(part)
            covered += part.numel()
        if covered != whole.numel():
            raise InputError(
                f"{self.name}: its chunks hold {covered} of its {whole.numel()} numbers: the "
                "checkpoint is incomplete or damaged"
            )
        return whole if index is None else whole[0]

    def _near(self, first: int, last: int) -> tuple[Chunk, ...]:
        """Returns the chunks that may hold rows [first, last)."""
        if not self.shape:
            return self.chunks
        start, stop = (
            bisect_left(self.chunks, row, key=lambda chunk: chunk.offsets[0])
            for row in (first - self._longest + 1, last)
        )
        return self.chunks[start:stop]

    @cached_property
    def _longest(self) -> int:
        return max((chunk.sizes[0] for chunk in self.chunks), default=0)

    def _saved(self, chunk: Chunk) -> StoredTensor:
        if id(chunk) in self._opened:
            return self._opened[id(chunk)]
        value = TorchFile(chunk.window).value
        if (
            not isinstance(value, StoredTensor)
            or value.shape != chunk.sizes
            or value.dtype != self.dtype
        ):
            raise InputError(
                f"{chunk.window}: must hold a chunk {chunk.sizes} of {self.name}: the checkpoint "
                "is damaged"
            )
        self._opened[id(chunk)] = value
        return value


def common_values(folder: Path) -> dict[str, Any]:
    """Returns what the checkpoint holds besides tensors. Raises InputError if it is damaged."""
    if not (folder / COMMON).exists():
        raise InputError(f"{folder}: holds no {COMMON}: it is no torch_dist checkpoint of Megatron")
    value = TorchFile(Window(folder / COMMON)).value
    if not isinstance(value, dict):
        raise InputError(f"{folder / COMMON}: holds no state dict")
    return value


def tensors_of(folder: Path) -> dict[str, DistTensor]:
    """Returns all tensors by name. Reads .metadata alone, and runs none of its code.

    Raises InputError if it is missing, damaged, or of another kind.
    """
    path = folder / DIST_METADATA
    if not path.exists():
        legacy = any(folder.glob("mp_rank_*"))
        hint = "; its mp_rank_* folders have the format --from megatron" if legacy else ""
        raise InputError(
            f"{folder}: holds no {DIST_METADATA}: it is no torch_dist checkpoint{hint}"
        )
    value = read_pickle(
        read_input(path, MOST_BYTES),
        str(path),
        calls=CALLS,
        inert=Inert(INERT.modules, INERT.names | NAMES),
    )
    try:
        tensors, places = (_fields(value)[name] for name in ("state_dict_metadata", "storage_data"))
        where = {_index(key): _window(folder, place) for key, place in places.items()}
        _check_lengths(list(where.values()))
        return {
            name: _tensor(name, found, where)
            for name, found in tensors.items()
            if _kind(found) == "TensorStorageMetadata"
        }
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise InputError(
            f"{path}: does not describe tensors as torch's distributed checkpoints do ({error}): "
            "it is damaged or of another version"
        ) from error


def _check_lengths(windows: list[Window]) -> None:
    """Raises ValueError if chunks share bytes: a small file could then hold very many chunks."""
    lengths: Counter[Path] = Counter()
    for window in windows:
        lengths[window.path] += window.length or 0
    for path, length in lengths.items():
        if length > input_size(path):
            raise ValueError(f"the chunks in {path.name} have {length} bytes, more than the file")


def _kind(value: Any) -> str:
    return (
        value.kind.rsplit(".", 1)[-1] if isinstance(value, PickledObject) else type(value).__name__
    )


def _fields(value: Any) -> dict[Any, Any]:
    if not isinstance(value, PickledObject):
        raise ValueError(f"a {type(value).__name__} stands where an object is expected")
    return value.fields


def _index(key: Any) -> str:
    """Returns the name of a tensor and the offsets of a chunk, as a text: a file can choose tuples
    of numbers whose hashes collide."""
    found = _fields(key)
    offsets, name = found.get("offset"), found["fqn"]
    if type(name) is not str or len(name) > LONGEST_NAME:
        raise ValueError("a tensor has no name")
    return _place(name, None if offsets is None else _sizes(offsets))


def _place(name: str, offsets: tuple[int, ...] | None) -> str:
    return f"{offsets} of {name}"


def _window(folder: Path, place: Any) -> Window:
    found = _fields(place)
    name, start, length = (found[key] for key in ("relative_path", "offset", "length"))
    # A name with folders could point at any file of this machine.
    if type(name) is not str or name != Path(name).name or name in ("", ".", ".."):
        raise ValueError("a chunk is outside of the folder")
    if type(start) is not int or type(length) is not int or min(start, length) < 0:
        raise ValueError(f"a chunk of {name} has no place")
    if found.get("transform_descriptors"):
        raise ValueError("its chunks are compressed or encrypted")
    return Window(folder / name, start, length)


def _tensor(name: Any, value: Any, where: Mapping[str, Window]) -> DistTensor:
    found = _fields(value)
    shape = _sizes(found["size"])
    dtype = DTYPE_NAMES.get(_dtype_name(found["properties"]))
    if type(name) is not str or dtype is None:
        raise ValueError(f"{name!r:.100} is of another kind than plain tensors")
    chunks = []
    for one in found["chunks"]:
        part = _fields(one)
        offsets, sizes = _sizes(part["offsets"]), _sizes(part["sizes"])
        if not len(offsets) == len(sizes) == len(shape) or any(
            offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"a chunk of {name} lies outside of the tensor")
        window = where.get(_place(name, offsets))
        if window is None or math.prod(sizes) * dtype.itemsize > (window.length or 0):
            raise ValueError(f"a chunk of {name} is in no file")
        chunks.append(Chunk(offsets, sizes, window))
    covered, numel = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(shape)
    if covered != numel:
        raise ValueError(f"the chunks of {name} hold {covered} of its {numel} numbers")
    return DistTensor(name, shape, dtype, tuple(sorted(chunks, key=lambda one: one.offsets[:1])))


def _dtype_name(properties: Any) -> str:
    """Returns the name of the dtype of TensorProperties, whose state is a tuple or a dict."""
    state = properties.state if isinstance(properties, PickledObject) else None
    found = state[0] if isinstance(state, tuple) and state else _fields(properties).get("dtype")
    return found.text if isinstance(found, Name) else ""


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > MOST_DIMS:
        raise ValueError("a shape is no list of numbers")
    if any(type(size) is not int or not 0 <= size <= MOST_ELEMENTS for size in value):
        raise ValueError("a shape has sizes of no tensor")
    return value
