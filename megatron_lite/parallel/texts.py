"""Exchanges short texts between ranks, such as the place of a fault or the name of a host.

The ranks wait for each other, so these functions do not belong in a step.
"""

from __future__ import annotations

from megatron_lite.parallel.collectives import all_gather_bytes
from megatron_lite.parallel.state import ParallelState


def gather_texts(text: str, parallel: ParallelState) -> list[str]:
    """Returns every rank's text, by rank. Issues two all-gathers over all ranks."""
    return [data.decode() for data in all_gather_bytes(text.encode(), parallel.world_group)]


def by_rank(texts: list[str], *, at_most: int = 8) -> str:
    """Returns "rank 3: TEXT; rank 5: TEXT" for the ranks whose text is not empty.

    at_most: the greatest number of texts; the rest is counted.
    """
    told = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    return "; ".join(told[:at_most]) + (
        f"; and {len(told) - at_most} more ranks" if len(told) > at_most else ""
    )
