"""Records the files that Python opens to read below a folder."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

_recording = []


def _hook(event, arguments):
    if event != "open" or not _recording:
        return
    path, _, flags = arguments
    if not isinstance(path, (str, os.PathLike)) or not isinstance(flags, int):
        return
    absolute = os.path.abspath(path)
    if flags & (os.O_WRONLY | os.O_CREAT | os.O_DIRECTORY):
        return
    for root, found in _recording:
        if absolute.startswith(root + os.sep) and os.path.isfile(absolute):
            found.add(Path(absolute))


sys.addaudithook(_hook)  # a hook stays for ever, so there is one for all tests


@contextmanager
def opened_below(root):
    """Yields the set of regular files below `root` that are opened to read during the block."""
    entry = (str(root), set())
    _recording.append(entry)
    try:
        yield entry[1]
    finally:
        _recording.remove(entry)
