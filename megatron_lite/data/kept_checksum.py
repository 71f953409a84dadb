"""The checksum of a checked file, computed once on a node.

The index of 10^9 documents has 20 GB. Eight ranks that each check and hash all of it would take
minutes at every start. One process does it, and keeps the checksum in the index cache under the
file's path, inode, size, time of modification and time of change. A user can set the time of
modification but not the time of change. So every later write to the file leads to another key, and
the file is checked again. Later runs miss only damage that the file system itself does not notice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from megatron_lite.data.index_cache import Allocate, Arrays, Build, in_memory

# A second write in the same tick of the clock leaves a file's times as they are. The checksum of a
# file that was changed so many seconds ago is not kept.
SETTLED_S = 10.0


class Keep(Protocol):
    """Returns the arrays of a key from the cache, or builds and keeps them."""

    def __call__(
        self, key: dict[str, Any], build: Build, *, fault: Callable[[Arrays], str | None]
    ) -> Arrays: ...


def kept_checksum(path: str, file: os.stat_result, checksum: Callable[[], str], keep: Keep) -> str:
    """Returns `checksum()`, the SHA-256 of a file in hexadecimal, or the one that was kept.

    file: the state of the opened file.
    """

    def build(allocate: Allocate) -> Arrays:
        return {"sha256": np.frombuffer(bytes.fromhex(checksum()), np.uint8)}

    def fault(arrays: Arrays) -> str | None:
        found = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
        return None if found == {"sha256": ("|u1", (32,))} else f"found {found}"

    key: dict[str, Any] = {"kind": "checked file 1", "path": os.path.abspath(path)}
    for name in ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns"):
        key[name] = getattr(file, name)
    if time.time() - max(file.st_mtime, file.st_ctime) < SETTLED_S:
        arrays = build(in_memory)
    else:
        arrays = keep(key, build, fault=fault)
    return arrays["sha256"].tobytes().hex()
