"""The named points of a save, in the order in which a save reaches them.

Tests stop a process at each of them. A rank that is killed between two points leaves the same files
as a rank that is killed at the first of the two.
"""

from __future__ import annotations

from enum import Enum


class Point(Enum):
    """A point of a save; the value describes what has just been done.

    The value of MODEL, OPTIMIZER and RNG is the kind of the tensor file.
    """

    SNAPSHOT = "every rank holds what it will write"
    FOLDER = "rank 0 has made the temporary folder"
    MODEL = "model"
    OPTIMIZER = "optimizer"
    RNG = "rng"
    TEXTS = "a rank has written all its files"
    LISTED = "every rank knows the sizes and checksums of all files"
    MANIFEST = "rank 0 has written the manifest"
    SYNCED = "the temporary folder is on the disk"
    ASIDE = "a step of the same iteration has been moved aside"
    RENAMED = "the step has its name"
    POINTER = "the new pointer is on the disk, under another name"
    POINTED = "the pointer names the step"
    SUPERSEDED = "a later step of a course that was left has another name"
    CONDEMNED = "a step that is not kept has another name"
    DELETED = "a step that is not kept is gone"
    DONE = "every rank knows that the step is durable"


def reached(point: Point) -> None:
    """Does nothing. Tests replace it."""
