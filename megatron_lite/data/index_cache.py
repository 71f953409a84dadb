"""Arrays that are costly to build, kept on disk under a key of everything that they depend on.

One folder per key, one .npy per array. A folder is filled under another name and renamed when it is on disk, so a kill leaves
nothing that looks complete. One lock per key: of several processes on a node one builds, the rest wait and then read. Nodes
need not see the same folder, nor each other's locks. Read by memory map, and never as pickles.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from megatron_lite.data.files import sync_file, sync_folder

Arrays = dict[str, np.ndarray]


def cached_arrays(folder: str, key: dict[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """What `build` returns, from `folder` where a complete copy lies there, else built and kept there.

    OSError where the folder cannot be written. `key`: plain values that decide the result.
    """
    text = json.dumps(key, sort_keys=True, indent=1)
    path = os.path.join(folder, hashlib.sha256(text.encode()).hexdigest()[:32])
    os.makedirs(folder, exist_ok=True)
    with _locked(path + ".lock"):
        arrays = _read(path)
        if arrays is None:
            _write(path, text, build())
            arrays = _read(path)
        assert arrays is not None, path
        return arrays


@contextmanager
def _locked(path: str) -> Iterator[None]:
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, by a crash too
        yield


def _read(path: str) -> Arrays | None:
    """None unless the folder holds every array that its list names, each of its full length."""
    try:
        with open(os.path.join(path, "arrays.json"), encoding="utf-8") as file:
            shapes = json.load(file)
        # (np.load would open a zip file too, and return something else)
        arrays = {name: np.lib.format.open_memmap(os.path.join(path, name + ".npy"), mode="r").view(np.ndarray)
                  for name in shapes}
    except (OSError, ValueError, TypeError, EOFError):
        return None
    return arrays if {name: list(array.shape) for name, array in arrays.items()} == shapes else None


def _write(path: str, description: str, arrays: Arrays) -> None:
    own = f"{path}.tmp-{socket.gethostname()}-"
    for remains in glob.glob(glob.escape(own) + "*"):  # of a process of this node that was killed: this one holds the lock
        shutil.rmtree(remains, ignore_errors=True)
    tmp = f"{own}{os.getpid()}"
    os.mkdir(tmp)
    try:
        for name, array in arrays.items():
            with open(os.path.join(tmp, name + ".npy"), "wb") as file:
                np.save(file, array, allow_pickle=False)
                sync_file(file)
        texts = {"arrays.json": json.dumps({name: list(array.shape) for name, array in arrays.items()}), "key.json": description}
        for name, text in texts.items():
            with open(os.path.join(tmp, name), "w", encoding="utf-8") as file:
                file.write(text)
                sync_file(file)
        sync_folder(tmp)
        shutil.rmtree(path, ignore_errors=True)
        try:
            os.rename(tmp, path)
        except OSError:
            if _read(path) is None:  # else another node, which sees this folder but not the lock, was faster
                raise
        sync_folder(os.path.dirname(path))
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
