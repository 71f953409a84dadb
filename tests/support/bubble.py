"""The idle time of a pipeline by its formula.

It is an oracle for the simulated schedules and for the examples' table.
"""

from __future__ import annotations


def bubble(*, size: int, num_microbatches: int, num_chunks: int = 1) -> float:
    """Returns the idle time over the busy time of a rank: (p - 1) / (v m).

    All stages take equally long. See section 2.2 of 2104.04473.
    """
    return (size - 1) / (num_chunks * num_microbatches)
