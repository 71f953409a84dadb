"""Directories that are full or cannot be written, also by root, whom permissions do not stop."""

import os
import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def small_disk(folder, kilobytes):
    """Yields a folder with its own file system of this size. Skips the test if it may not mount."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def check_can_mount(folder):
    """Skips the test if `make_read_only` would need to mount and may not."""
    if os.geteuid() == 0:
        with small_disk(folder / "probe", kilobytes=4):
            pass


def make_read_only(folder):
    """Makes the folder read-only for everybody. Root mounts the folder over itself, read-only."""
    if os.geteuid() != 0:
        folder.chmod(0o555)
        return
    for arguments in (["--bind", str(folder), str(folder)], ["-o", "remount,bind,ro", str(folder)]):
        subprocess.run(["mount", *arguments], check=True, capture_output=True)


def make_writable(folder):
    """Undoes `make_read_only`, if it ran."""
    if os.geteuid() == 0:  # no check before: is_mount() misses a folder mounted over itself
        subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)
    folder.chmod(0o755)


def _mount(*arguments):
    try:
        done = subprocess.run(["mount", *arguments], check=False, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no mount: {error}")
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.strip()}")
