"""Keeps memory that a step frees in the process, so that the next step does not fetch it again.

glibc returns the free memory at the end of its heap to the kernel as soon as it is large. The
kernel fills each page with zeros before it hands it out again, which takes up to a few percent of
the processor time of a training step on a CPU (docs/performance.md). A step allocates the same
blocks as the step before it, so the process keeps them.

The resident memory of a process then stays at its highest value. What torch allocates does not
change. Other C libraries, such as musl, have other rules and stay as they are.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping

# Parameters of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER = 2**31 - 1  # bytes at the top of the heap; the largest number that mallopt takes
# Larger blocks get a mapping of their own, which ends when they are freed. glibc raises its own
# limit up to this value while it meets larger blocks. In the heap they would leave gaps: torch
# aligns blocks to 64 bytes, and a gap is too small for another block of its size.
LARGEST_KEPT = 32 * 2**20
Mallopt = Callable[[int, int], int]


def keep_freed_memory(
    environment: Mapping[str, str] = os.environ, mallopt: Mallopt | None = None
) -> bool:
    """Makes the C library keep freed memory for this process. Returns whether it does.

    It does not if the C library is not glibc, or if a variable of the environment sets glibc's
    heap: then the user has chosen.
    mallopt: the function of the C library; by default that of this process.
    """
    if any(name.startswith("MALLOC_") and name.endswith("_") for name in environment):
        return False
    if "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return False
    if mallopt is None:
        library = ctypes.CDLL(None)
        if not hasattr(library, "gnu_get_libc_version"):
            return False
        mallopt = library.mallopt
    # Either setting alone stops glibc from raising the other one, and then every block of 128 KiB
    # is returned at once.
    return all(
        mallopt(parameter, value) == 1
        for parameter, value in ((M_MMAP_THRESHOLD, LARGEST_KEPT), (M_TRIM_THRESHOLD, NEVER))
    )
