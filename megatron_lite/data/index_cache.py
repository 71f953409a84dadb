"""A cache on disk for arrays that are costly to build, under a key of everything they depend on.

Each key has a folder. It holds one file per array, NAME.SHA256.npy. Every start compares the
checksums, so that it notices a damaged file before it reads an index from it. It then builds the
arrays again, with a notice.

A folder is filled under another name, and renamed when its contents are on the disk. Thus a kill
leaves nothing that looks complete. Each key has one lock: among several processes on a node one
builds, and the others wait and read the result. Nodes need not see the same folder or each other's
locks. The arrays are read by memory map, and never as pickles.
"""

import fcntl
import glob
import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_lite.config.checks import InputError, Values

from .durable_files import checksum_of, sync

Arrays = dict[str, np.ndarray]
Fault = Callable[[Arrays], str | None]  # returns what is wrong with arrays
FORMAT = "index cache 3"  # part of every key, so that a folder of another format is never read


class Expected(NamedTuple):
    """The length of an array, and the bounds of its whole numbers: low <= number < stop."""

    length: int
    low: int
    stop: int


def arrays_fault(arrays: Arrays, expected: Mapping[str, Expected]) -> str | None:
    """Returns what is wrong with arrays that were read from files; None if nothing is."""
    if set(arrays) != set(expected):
        return f"found arrays {sorted(arrays)}, expected {sorted(expected)}"
    for name, (length, low, stop) in expected.items():
        array = arrays[name]
        if array.shape != (length,) or array.dtype.kind not in "iu":
            return f"{name}: found {array.dtype} {array.shape}, {length} whole numbers expected"
        if array.size and not (low <= array.min() and array.max() < stop):
            return f"{name} holds {array.min()} to {array.max()}, expected {low} to {stop - 1}"
    return None


class Damage(OSError):
    """The error of a damaged cache folder. Its message names the file."""


def kept_arrays(
    data_cache_path: str | None,
    prefix: str,
    key: Values,
    build: Callable[[], Arrays],
    *,
    fault: Fault,
) -> Arrays:
    """Returns the arrays that `build` returns, from the copy in the cache if it is undamaged.

    Otherwise it builds the arrays and keeps a copy: in `data_cache_path`, or in PREFIX_cache beside
    the data; if that folder cannot be written, nothing is kept. It reads every byte of a copy once,
    outside the lock, so that all processes of a node can compare checksums at the same time.

    key: plain values that decide the result.
    fault: returns what is wrong with arrays whose checksum is correct, or None. Arrays with a fault
    are built again too.
    Raises InputError if `data_cache_path` is given and cannot be written.
    """
    text = json.dumps({"format": FORMAT, **key}, sort_keys=True, indent=1)
    folder = data_cache_path or prefix + "_cache"
    path = Path(folder, hashlib.sha256(text.encode()).hexdigest()[:32])
    # Another process may be replacing a damaged copy just now: the check is repeated in the lock.
    with suppress(Damage):
        return _read(path, fault)
    try:
        os.makedirs(folder, exist_ok=True)
        with open(f"{path}.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file releases it, and so does a crash
            try:
                if os.path.lexists(path):
                    return _read(path, fault)
            except Damage as damage:
                text = f"warning: the index cache is damaged and is built again: {damage}"
                with suppress(OSError):  # standard error may be full
                    print(text, file=sys.stderr, flush=True)
            _write(path, build())
            return _read(path, fault)
    except OSError as error:
        if data_cache_path is None:
            return build()
        raise InputError(f"--data-cache-path {data_cache_path} cannot be used: {error}") from error


def _read(path: Path, fault: Fault) -> Arrays:
    """Returns the arrays of a folder, by memory map.

    The checksum of a file is compared before anything in the file is interpreted. Raises Damage if
    a file does not hold what was written, or if `fault` finds a fault.
    """
    try:
        arrays = {}
        for file in path.iterdir():
            name, checksum, _ = file.name.split(".")
            if checksum_of(file)[1] != checksum:
                raise ValueError(f"{file.name}: its checksum is not the one in its name")
            # np.load would open zip files too
            arrays[name] = np.lib.format.open_memmap(file, mode="r").view(np.ndarray)
        if reason := fault(arrays):
            raise ValueError(reason)
    except (OSError, ValueError) as error:
        raise Damage(f"{path}: {error}") from error
    return arrays


def _write(path: Path, arrays: Arrays) -> None:
    own = f"{path}.tmp-{socket.gethostname()}-"
    # This process holds the lock, so the folders of this node were left by killed processes.
    for remains in glob.glob(glob.escape(own) + "*"):
        shutil.rmtree(remains, ignore_errors=True)
    tmp = Path(f"{own}{os.getpid()}")
    tmp.mkdir()
    try:
        for name, array in arrays.items():
            file = tmp / "array.npy"
            np.save(file, array, allow_pickle=False)
            sync(file)
            file.rename(tmp / f"{name}.{checksum_of(file)[1]}.npy")
        sync(tmp)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        try:
            tmp.rename(path)
        except OSError:
            # Another node may see this folder but not the lock, and may have been faster. The
            # caller reads its copy.
            if not path.is_dir():
                raise
        sync(path.parent)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
