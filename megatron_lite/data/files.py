"""Files that survive a power cut: contents reach the disk before the name does."""

from __future__ import annotations

import os
from typing import IO, Any


def sync_file(file: IO[Any]) -> None:
    """Returns once all that was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: str) -> None:
    """Returns once the names in a folder (new, renamed, removed) are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
