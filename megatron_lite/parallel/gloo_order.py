"""The order in which gloo's all-reduce adds the ranks' values, so that other code gets its bits.

gloo splits a tensor into a chunk for each rank. A chunk travels around the ring against the rank
order, and each rank adds its own values. For chunk c of 4 ranks:

    ((x[c-1] + x[c-2]) + x[c-3]) + x[c]        ranks modulo 4

The sum of two values does not depend on their order, so two ranks need none of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MAX_SEGMENT_BYTES = 2**20  # a message of gloo is never larger; its chunks are whole segments


class Stretch(NamedTuple):
    """Elements [start, stop) of a tensor, and the ranks in the order in which they are added."""

    start: int
    stop: int
    ranks: tuple[int, ...]


def chunk_elements(num_elements: int, element_bytes: int, size: int) -> int:
    """Returns the elements of each chunk but the last ones, which may be shorter or empty."""
    num_bytes = num_elements * element_bytes
    segment = element_bytes * max(1, MAX_SEGMENT_BYTES // element_bytes)
    # gloo gives each rank equally many segments, and at least two.
    segments = _round_up(max(-(-num_bytes // segment), 2 * size), size)
    return segments // size * _round_up(-(-num_bytes // segments), element_bytes) // element_bytes


def stretches(start: int, stop: int, chunk: int, size: int) -> Iterator[Stretch]:
    """Yields the parts of elements [start, stop), each added in one order. chunk: its elements."""
    while start < stop:
        number = start // chunk
        end = min(stop, (number + 1) * chunk)
        yield Stretch(start, end, tuple((number - 1 - hop) % size for hop in range(size)))
        start = end


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
