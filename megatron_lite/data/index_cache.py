"""A cache on disk for arrays that are costly to build, under a key of everything they depend on.

Each key has a folder. It holds one .npy file per array, and arrays.json with the type, shape and
SHA-256 of each. Every start compares the checksums, so that it notices a damaged file before it
reads an index from it. It then builds the arrays again, with a notice.

A folder is filled under another name, and renamed when its contents are on the disk. Thus a kill
leaves nothing that looks complete. Each key has one lock: among several processes on a node one
builds, and the others wait and read the result. Nodes need not see the same folder or each other's
locks. The arrays are read by memory map, and never as pickles. They may be built in their files,
too, so that an index may be larger than memory.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from megatron_lite.config.checks import InputError
from megatron_lite.data.durable_files import sync, write_synced

Arrays = dict[str, np.ndarray]
LIST, KEY = "arrays.json", "key.json"
FORMAT = "index cache 2"  # part of every key, so that a folder of another format is never read
LARGEST_LIST = 1 << 20


class Allocate(Protocol):
    """Makes an array without values for one of the arrays that are built."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: Any, /) -> np.ndarray: ...


Build = Callable[[Allocate], Arrays]


def in_memory(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns a new array in memory: the Allocate of arrays that are not kept."""
    return np.empty(shape, dtype)


class Damage(Exception):
    """The error of a damaged cache folder. Its message names the file."""


class _Expected(NamedTuple):
    """One array as it was written. sha256: the checksum of the whole file, with its header."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def kept_arrays(
    data_cache_path: str | None,
    prefix: str,
    key: dict[str, Any],
    build: Build,
    *,
    fault: Callable[[Arrays], str | None],
) -> Arrays:
    """Returns the arrays that `build` returns, kept in `data_cache_path` or beside the data.

    The folder beside the data is PREFIX_cache; if it cannot be written, nothing is kept. Raises
    InputError if `data_cache_path` is given and cannot be written.
    """
    try:
        return cached_arrays(data_cache_path or prefix + "_cache", key, build, fault=fault)
    except OSError as error:
        if data_cache_path is not None:
            raise InputError(
                f"--data-cache-path {data_cache_path} cannot be used: {error}"
            ) from error
        return build(in_memory)


def cached_arrays(
    folder: str,
    key: dict[str, Any],
    build: Build,
    *,
    fault: Callable[[Arrays], str | None] = lambda arrays: None,
    say: Callable[[str], object] = _say,
) -> Arrays:
    """Returns the arrays that `build` returns, from the copy in `folder` if it is undamaged.

    Otherwise it builds the arrays and writes a copy to `folder`. It reads every byte of a copy
    once, outside the lock, so that all processes of a node can compare checksums at the same time.

    key: plain values that decide the result.
    build: what it allocates lies in the file of that array already, and takes no memory of its own.
    fault: returns what is wrong with arrays whose checksum is correct, or None. Arrays with a fault
    are built again too.
    say: is called with one line if a damaged copy is replaced.
    Raises OSError if the folder cannot be written.
    """
    text = json.dumps({"format": FORMAT, **key}, sort_keys=True, indent=1)
    path = os.path.join(folder, hashlib.sha256(text.encode()).hexdigest()[:32])
    try:
        if (arrays := _read(path, text, fault)) is not None:
            return arrays
    except Damage:
        pass  # another process may be replacing it just now, so the check is repeated in the lock
    os.makedirs(folder, exist_ok=True)
    with _locked(path + ".lock"):
        try:
            arrays = _read(path, text, fault)
        except Damage as damage:
            arrays = None
            say(f"warning: the index cache is damaged and is built again: {damage}")
        if arrays is None:
            _write(path, text, build)
            try:
                arrays = _read(path, text, fault)
            except Damage as damage:
                raise OSError(
                    f"what was written does not come back from the disk: {damage}"
                ) from damage
        assert arrays is not None, path
        return arrays


@contextmanager
def _locked(path: str) -> Iterator[None]:
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file releases it, and so does a crash
        yield


def _read(path: str, key: str, fault: Callable[[Arrays], str | None]) -> Arrays | None:
    """Returns the arrays of a folder, or None if the folder does not exist.

    Raises Damage if a file does not hold what was written, or if `fault` finds a fault.
    """
    if not os.path.lexists(path):
        return None
    try:
        if _content(os.path.join(path, KEY)) != key.encode():
            raise Damage(f"{os.path.join(path, KEY)} holds another key")
        arrays = {
            name: _array(os.path.join(path, name + ".npy"), expected)
            for name, expected in _expected(os.path.join(path, LIST)).items()
        }
    except (OSError, ValueError) as error:
        raise Damage(f"{path}: {error}") from error
    if (reason := fault(arrays)) is not None:
        raise Damage(f"{path}: {reason}")
    return arrays


def _expected(path: str) -> dict[str, _Expected]:
    """Returns the list of the arrays. Raises Damage unless `_listed` would write the same bytes."""
    content = _content(path)
    try:
        found = {
            name: _Expected(entry["dtype"], tuple(entry["shape"]), entry["sha256"])
            for name, entry in json.loads(content).items()
        }
        if _listed(found) == content and all(name.isidentifier() for name in found):
            return found
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise Damage(f"{path} is no list of arrays with their checksums")


def _listed(expected: dict[str, _Expected]) -> bytes:
    return json.dumps({name: one._asdict() for name, one in expected.items()}, indent=1).encode()


def _array(path: str, expected: _Expected) -> np.ndarray:
    """Returns one array, by memory map.

    The file's checksum is compared before anything in the file is interpreted.
    """
    with _opened(path) as file:
        found = _checksum(file)
    if found != expected.sha256:
        raise Damage(f"{path}: found checksum {found[:12]}, expected {expected.sha256[:12]}")
    # np.load would open zip files too
    array: np.ndarray = np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
    if (array.dtype.str, array.shape) != (expected.dtype, expected.shape):
        raise Damage(
            f"{path}: found {array.dtype.str} {array.shape}, expected {expected.dtype} "
            f"{expected.shape}"
        )
    return array


def _content(path: str) -> bytes:
    with _opened(path) as file:
        return file.read(LARGEST_LIST)


def _opened(path: str) -> BinaryIO:
    """Opens a regular file.

    Raises Damage if it is a link, a device or a pipe, which could make a reader wait.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    file = open(path, "rb", opener=opener)  # noqa: SIM115  (the caller closes it)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise Damage(f"{path} is no regular file")


def _checksum(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _write(path: str, key: str, build: Build) -> None:
    own = f"{path}.tmp-{socket.gethostname()}-"
    # This process holds the lock, so the folders of this node were left by killed processes.
    for remains in glob.glob(glob.escape(own) + "*"):
        shutil.rmtree(remains, ignore_errors=True)
    tmp = f"{own}{os.getpid()}"
    os.mkdir(tmp)
    try:
        expected = {}
        mapped: Arrays = {}

        def allocate(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            mapped[name] = _mapped(os.path.join(tmp, name + ".npy"), shape, dtype)
            return mapped[name]

        for name, array in build(allocate).items():
            if array is not mapped.get(name):
                np.save(os.path.join(tmp, name + ".npy"), array, allow_pickle=False)
            sync(os.path.join(tmp, name + ".npy"))
            with open(os.path.join(tmp, name + ".npy"), "rb") as written:
                expected[name] = _Expected(array.dtype.str, array.shape, _checksum(written))
        for name, content in ((LIST, _listed(expected)), (KEY, key.encode())):
            write_synced(os.path.join(tmp, name), content)
        sync(tmp)
        _remove(path)
        try:
            os.rename(tmp, path)
        except OSError:
            # Another node may see this folder but not the lock, and may have been faster. The
            # caller reads its copy.
            if not os.path.isdir(path):
                raise
        sync(os.path.dirname(path))
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _mapped(path: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns a new array that lies in a file. Raises OSError if the disk has no room for it."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
    with open(path, "r+b") as file:
        # A page of the map without room on the disk would end the process with SIGBUS.
        os.posix_fallocate(file.fileno(), 0, os.path.getsize(path))
    return array.view(np.ndarray)


def _remove(path: str) -> None:
    """Removes a damaged copy: a folder, a file or a link."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)
