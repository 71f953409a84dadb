"""Records the file-system calls of a save in order: the files and folders that it syncs, and the
names that it changes."""

import os
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest


class Call(NamedTuple):
    """One call.

    name: "fsync", "rename", "unlink" or "rmdir".
    path: the file or folder that is synced, renamed or removed.
    target: the new name in a rename, else "".
    times: the time of the last change in ns, by path. A rename has every file below its source, an
        fsync has its file.
    """

    name: str
    path: str
    target: str
    times: dict[str, int]


@contextmanager
def recorded():
    """Yields the list of calls of this process during the block. os.replace counts as a rename."""
    calls = []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "rename", "unlink", "rmdir")}

    def fsync(descriptor):
        real["fsync"](descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append(Call("fsync", path, "", {path: os.fstat(descriptor).st_mtime_ns}))

    def renaming(name):
        def call(source, target):
            below = Path(source).iterdir() if Path(source).is_dir() else (Path(source),)
            times = {str(path): path.stat().st_mtime_ns for path in below}
            real[name](source, target)
            calls.append(Call("rename", str(source), str(target), times))

        return call

    def removing(name):
        def call(path, *, dir_fd=None):
            folder = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            real[name](path, dir_fd=dir_fd)
            calls.append(Call(name, os.path.join(folder, path), "", {}))

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        for name in ("replace", "rename"):
            patch.setattr(os, name, renaming(name))
        for name in ("unlink", "rmdir"):
            patch.setattr(os, name, removing(name))
        yield calls
