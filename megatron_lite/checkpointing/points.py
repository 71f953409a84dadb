"""The named points of a save, in the order in which it reaches them. Tests stop a process at each of them.

A rank that is killed anywhere in between leaves what it would have left at the point before.
"""

from __future__ import annotations

from enum import Enum


class Point(Enum):
    """What has just been done. `value` of MODEL, OPTIMIZER and RNG: the kind of the tensor file."""

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
    """Does nothing. Tests put something else in its place."""
