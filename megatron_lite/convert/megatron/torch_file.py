"""Reads what `torch.save` wrote: plain values, and tensors that lie in the file's memory map.

Since torch 1.6 such a file is a zip archive without compression. `data.pkl` is a pickle of the
value, and each `data/N` holds the bytes of one storage. A file may also lie inside another file, as
in the shards of torch's distributed checkpoints.
"""

from __future__ import annotations

import mmap
import os
import struct
import zipfile
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron_lite.checkpointing.shards import MOST_DIMS
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import crafted, open_input
from megatron_lite.convert.megatron.pickles import (
    CALLS,
    LONGEST_NAME,
    MOST_ARGUMENTS,
    MOST_BYTES,
    STORAGES,
    read_pickle,
)

DTYPES = {str(dtype): dtype for dtype in STORAGES.values()}
LOCAL_HEADER = struct.Struct("<4s22xHH")  # the signature, the lengths of the name and the extra
SIGNATURE = b"PK\x03\x04"
REBUILD, RETYPE = "torch._utils._rebuild_tensor_v2", "torch._tensor._rebuild_from_type_v2"


class Window(NamedTuple):
    """A file, or the part of one from `start` that has `length` bytes (None: to its end)."""

    path: Path
    start: int = 0
    length: int | None = None

    def __str__(self) -> str:
        return str(self.path) if self.start == 0 else f"{self.path} (from byte {self.start})"


def read_torch_file(window: Window, *, shared: bool = False) -> Any:
    """Returns the value in a file of torch.save. Bytes of tensors are read when they are used.

    shared: whether the file, which this process has made, gets what is written to its tensors.
    Raises InputError if the file cannot be read, is of another kind, or names code to run.
    """
    with crafted(str(window)):
        return _Archive(window, shared).value()


class _Archive:
    """The members of the archive, and a memory map of the file up to the archive's end."""

    def __init__(self, window: Window, shared: bool) -> None:
        self._window = window
        with window.path.open("r+b") if shared else open_input(window.path) as file:
            size = os.fstat(file.fileno()).st_size
            end = size if window.length is None else window.start + window.length
            if not 0 <= window.start <= end <= size:
                raise ValueError(f"it has {size} bytes, and {end} are needed")
            if os.pread(file.fileno(), len(SIGNATURE), window.start) != SIGNATURE:
                raise InputError(
                    f"{window}: is no zip archive as torch.save writes it since torch 1.6. If it "
                    "is an older file of torch.save, which mixes tensors and code, load and save "
                    "it again with a torch that you trust it with"
                )
            access = mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY
            self._bytes = mmap.mmap(file.fileno(), end, access=access)
        # zipfile looks for the archive at the end, so the file before it is no trouble.
        with zipfile.ZipFile(cast(IO[bytes], self._bytes)) as archive:
            self._members = {one.filename: one for one in archive.infolist()}
        if sum(one.file_size for one in self._members.values()) > end - window.start:
            raise ValueError("its members are longer than the file")

    def value(self) -> Any:
        (name,) = (name for name in self._members if name.endswith("/data.pkl"))
        self._folder = name.removesuffix("data.pkl")
        order = f"{self._folder}byteorder"
        if order in self._members and self._contents(order) != b"little":
            raise ValueError("its numbers are not little-endian")
        return read_pickle(
            self._contents(name),
            str(self._window),
            calls={REBUILD: self._tensor, RETYPE: self._retyped},
            persistent_load=self._storage,
        )

    def _contents(self, name: str) -> bytes:
        start, size = self._place(name)
        if size > MOST_BYTES:
            raise ValueError(f"{name} is longer than {MOST_BYTES} bytes")
        return self._bytes[start : start + size]

    def _place(self, name: str) -> tuple[int, int]:
        """Returns where the bytes of a member begin, and how many there are."""
        member = self._members[name]
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise ValueError(f"{name} is compressed or encrypted")
        found = LOCAL_HEADER.unpack_from(self._bytes, member.header_offset)
        if found[0] != SIGNATURE or member.header_offset < self._window.start:
            raise ValueError(f"{name} is not where the archive says")
        # The extra field here may be longer than the one in the archive's directory: torch fills it
        # up so that the data are aligned.
        start = member.header_offset + LOCAL_HEADER.size + found[1] + found[2]
        return start, min(member.file_size, len(self._bytes) - start)

    def _storage(self, found: Any) -> Tensor:
        kind, storage_type, key, _, numel = found
        # the text of a nested list could be endless
        if type(key) is not str or len(key) > LONGEST_NAME:
            raise ValueError("the name of a storage is no text")
        if kind != "storage" or type(numel) is not int or storage_type.text not in STORAGES:
            raise ValueError(f"a storage is of another kind ({key!r})")
        dtype = STORAGES[storage_type.text]
        start, size = self._place(f"{self._folder}data/{key}")
        if not 0 <= numel * dtype.itemsize <= size:
            raise ValueError(f"a storage of {numel} numbers has {size} bytes")
        held = size // dtype.itemsize
        if held == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._bytes, dtype=dtype, count=held, offset=start)

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
        if not isinstance(storage, Tensor) or not len(stride) == len(shape) <= MOST_DIMS:
            raise ValueError(f"a tensor has no storage, or more than {MOST_DIMS} dims")
        if any(type(one) is not int for one in (offset, *shape, *stride)):
            raise ValueError("a tensor has sizes that are no numbers")
        # torch raises RuntimeError for what lies outside of the storage.
        found = storage.as_strided(shape, stride, offset)
        # A tensor that repeats its elements would become larger than the file.
        if found.numel() > storage.numel():
            raise ValueError(f"a tensor of shape {shape} repeats its numbers")
        return found

    def _retyped(self, made: Any, _: Any, given: Any, *__: Any) -> Any:
        """Returns a tensor that torch saved with its Python attributes, which are left out."""
        return {**CALLS, REBUILD: self._tensor}[made.text](*given[:MOST_ARGUMENTS])
