"""Reads what `torch.save` wrote: plain values at once, tensors when they are asked for.

Since torch 1.6 such a file is a zip archive without compression. `data.pkl` is a pickle of the
value, and each `data/N` holds the bytes of one storage. A file may also lie inside another file, as
in the shards of torch's distributed checkpoints.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpointing.layout import MOST_DIMS, MOST_ELEMENTS
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import crafted, open_input
from megatron_lite.convert.megatron.pickles import (
    INERT,
    LONGEST_NAME,
    MOST_BYTES,
    Inert,
    Name,
    PickledObject,
    read_pickle,
)

DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
STORAGES = {f"torch.{name}": dtype for name, dtype in DTYPES.items()} | {
    "torch.storage.UntypedStorage": torch.uint8
}
NAMES = frozenset(STORAGES) | frozenset(
    str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)
)
LOCAL_HEADER = struct.Struct("<4s22xHH")  # the signature, the lengths of the name and the extra
REBUILD = "torch._utils._rebuild_tensor_v2"
RETYPE = "torch._tensor._rebuild_from_type_v2"


class Window(NamedTuple):
    """A file, or the part of one from `start` that has `length` bytes (None: to its end)."""

    path: Path
    start: int = 0
    length: int | None = None

    def __str__(self) -> str:
        return str(self.path) if self.start == 0 else f"{self.path} (from byte {self.start})"


class _Storage(NamedTuple):
    """A storage inside a file. name: that of the archive's member. numel: its elements."""

    name: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file, which is read by `read`."""

    file: TorchFile
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    def read(self) -> Tensor:
        """Returns the tensor, on the CPU. Reads only the bytes that it spans."""
        # the place of the last element behind the first one
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        length = 0 if 0 in self.shape else last + 1
        flat = self.file.read_storage(self.storage, self.offset, length)
        return flat.as_strided(self.shape, self.stride)

    def rows(self, start: int, length: int) -> StoredTensor:
        """Returns rows [start, start + length) of the first dim as a tensor of its own."""
        assert 0 <= start <= start + length <= self.shape[0], (start, length, self.shape)
        return replace(
            self, offset=self.offset + start * self.stride[0], shape=(length, *self.shape[1:])
        )

    def part(self, start: int, shape: tuple[int, ...]) -> StoredTensor:
        """Returns the elements of a contiguous row from `start` on as a tensor of a shape."""
        assert self.stride == (1,) and start + torch.Size(shape).numel() <= self.shape[0]
        # the strides of a contiguous tensor of this shape
        stride = tuple(torch.Size(shape[dim + 1 :]).numel() for dim in range(len(shape)))
        return replace(self, offset=self.offset + start, shape=shape, stride=stride)

    def write(self, values: Tensor) -> None:
        """Replaces the numbers in the file. The tensor must be contiguous there."""
        assert values.shape == self.shape and values.dtype == self.dtype, (self, values.shape)
        self.file.write_storage(self.storage, self.offset, values)

    def head(self, count: int) -> Tensor:
        """Returns the first elements, at most `count`, in the order of a contiguous tensor."""
        numel = torch.Size(self.shape).numel()
        expected = 1
        for size, step in zip(self.shape[::-1], self.stride[::-1], strict=True):
            if size > 1 and step != expected:
                return self.read().flatten()[:count].clone()
            expected *= size
        return self.file.read_storage(self.storage, self.offset, min(count, numel))


class TorchFile:
    """One file of `torch.save`. Its value is read at once, its tensors are `StoredTensor`s.

    Raises InputError if the file cannot be read, is of another kind, or names code to run.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._members: dict[str, zipfile.ZipInfo] = {}
        with crafted(str(window)), self._open() as file:
            self._check_start(file)
            self.value = self._read_value(file)

    def read_storage(self, storage: _Storage, offset: int, numel: int) -> Tensor:
        """Returns elements [offset, offset + numel) of a storage as a flat tensor."""
        size = storage.dtype.itemsize
        buffer = bytearray(numel * size)
        with crafted(f"{self._window}: {storage.name}"), self._open() as file:
            file.seek(self._data_start(file, self._members[storage.name]) + offset * size)
            if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
                raise ValueError("it ends too early")
        return (
            torch.frombuffer(buffer, dtype=storage.dtype)
            if numel
            else torch.empty(0, dtype=storage.dtype)
        )

    def write_storage(self, storage: _Storage, offset: int, values: Tensor) -> None:
        """Writes the elements of a storage from `offset` on."""
        with self._window.path.open("r+b") as file:
            start = self._data_start(file, self._members[storage.name])
            file.seek(self._window.start + start + offset * storage.dtype.itemsize)
            flat = values.detach().contiguous().flatten()
            file.write(flat.view(torch.uint8).numpy().data)

    def _open(self) -> BinaryIO:
        raw = open_input(self._window.path)
        return io.BufferedReader(_FilePart(raw, self._window.start, self._window.length))

    def _check_start(self, file: BinaryIO) -> None:
        start = file.read(4)
        if start != b"PK\x03\x04":
            raise InputError(
                f"{self._window}: is no zip archive as torch.save writes it since torch 1.6. If it "
                "is an older file of torch.save, which mixes tensors and code, load and save it "
                "again with a torch that you trust it with"
            )

    def _read_value(self, file: BinaryIO) -> Any:
        with zipfile.ZipFile(file) as archive:
            self._members = {info.filename: info for info in archive.infolist()}
            size = file.seek(0, io.SEEK_END)
            for info in self._members.values():
                if info.header_offset + info.file_size > size:
                    raise ValueError(f"{info.filename} is longer than the file")
            pickles = [name for name in self._members if name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise ValueError(f"it has {len(pickles)} members data.pkl, not one")
            folder = pickles[0].removesuffix("data.pkl")
            order = f"{folder}byteorder"
            if order in self._members and self._contents(file, order) != b"little":
                raise ValueError("its numbers are not little-endian")
            data = self._contents(file, pickles[0])
        return read_pickle(
            data,
            str(self._window),
            calls={**CALLS, REBUILD: self._tensor, RETYPE: self._retyped},
            inert=Inert(INERT.modules, INERT.names | NAMES),
            persistent_load=lambda found: self._storage(folder, found),
        )

    def _contents(self, file: BinaryIO, name: str) -> bytes:
        member = self._members[name]
        if member.file_size > MOST_BYTES:
            raise ValueError(f"{name} is longer than {MOST_BYTES} bytes")
        file.seek(self._data_start(file, member))
        return file.read(member.file_size)

    def _data_start(self, file: BinaryIO, member: zipfile.ZipInfo) -> int:
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise ValueError(f"{member.filename} is compressed or encrypted")
        file.seek(member.header_offset)
        signature, name_length, extra_length = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
        if signature != b"PK\x03\x04":
            raise ValueError(f"{member.filename} is not where the archive says")
        # The extra field here may be longer than the one in the archive's directory: torch fills it
        # up so that the data are aligned.
        return member.header_offset + LOCAL_HEADER.size + name_length + extra_length

    def _storage(self, folder: str, found: Any) -> _Storage:
        kind, storage_type, key, _, numel = found
        # the text of a nested list could be endless
        if type(key) is not str or len(key) > LONGEST_NAME:
            raise ValueError("the name of a storage is no text")
        dtype = STORAGES.get(storage_type.text)
        name = f"{folder}data/{key}"
        member = self._members.get(name)
        if kind != "storage" or type(numel) is not int or dtype is None or member is None:
            raise ValueError(f"a storage is missing or of another kind ({key!r})")
        if numel < 0 or numel * dtype.itemsize > member.file_size:
            raise ValueError(f"a storage of {numel} numbers has {member.file_size} bytes")
        return _Storage(name, dtype, numel)

    def _tensor(
        self,
        storage: _Storage,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        *_: Any,
    ) -> StoredTensor:
        if len(shape) > MOST_DIMS or len(shape) != len(stride):
            raise ValueError(f"a tensor has {len(shape)} dims and {len(stride)} strides")
        numbers = (offset, *shape, *stride)
        if not isinstance(storage, _Storage) or any(
            type(one) is not int or not 0 <= one < MOST_ELEMENTS for one in numbers
        ):
            raise ValueError("a tensor has no storage, or sizes that are no numbers")
        numel, last = 1, offset
        for size, step in zip(shape, stride, strict=True):
            numel, last = numel * size, last + max(0, size - 1) * step
        # A tensor that repeats its elements would become larger than the file.
        if numel and (last >= storage.numel or numel > storage.numel):
            raise ValueError(f"a tensor of shape {shape} lies outside its storage")
        return StoredTensor(self, storage, offset, tuple(shape), tuple(stride))

    def _retyped(self, function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        """Returns a tensor that torch saved with its Python attributes, which are left out."""
        if type(function) is Name and type(arguments) is tuple:
            if function.text == REBUILD:
                return self._tensor(*arguments)
            if function.text in CALLS:
                return CALLS[function.text](*arguments)
        return PickledObject(RETYPE, (function, kind, arguments, state))


class _FilePart(io.RawIOBase):
    """The part of an open file from `start` that has `length` bytes. Closing it closes the file."""

    def __init__(self, raw: BinaryIO, start: int, length: int | None) -> None:
        size = raw.seek(0, io.SEEK_END)
        self._raw, self._start = raw, start
        self._length = size - start if length is None else length
        if start < 0 or self._length < 0 or start + self._length > size:
            raw.close()
            raise ValueError(f"it has {size} bytes, and {start + self._length} are needed")
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a place before its start is asked for")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        self._raw.seek(self._start + self._position)
        count = self._raw.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


def _ordered(items: Any = ()) -> dict[Any, Any]:
    if items:
        raise ValueError("an ordered dict is made from items")
    return {}


def _size(sizes: Any) -> tuple[int, ...]:
    if type(sizes) not in (list, tuple) or len(sizes) > MOST_DIMS:
        raise ValueError(f"a torch.Size has more than {MOST_DIMS} dims")
    if any(type(size) is not int for size in sizes):
        raise ValueError("a torch.Size is no list of numbers")
    return tuple(sizes)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _default(*_: Any) -> dict[Any, Any]:
    return {}


CALLS: dict[str, Callable[..., Any]] = {
    "collections.defaultdict": _default,
    "collections.OrderedDict": _ordered,
    "torch.Size": _size,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
