"""Short texts that ranks tell each other: where a fault is, what a host is called. Not for the step: they wait for each other."""

from __future__ import annotations

from megatron_lite.parallel.collectives import all_gather_bytes
from megatron_lite.parallel.state import ParallelState


def gather_texts(text: str, parallel: ParallelState) -> list[str]:
    """Every rank's text, by rank. Two all-gathers over all ranks."""
    return [data.decode() for data in all_gather_bytes(text.encode(), parallel.world_group)]


def by_rank(texts: list[str], *, at_most: int = 8) -> str:
    """"rank 3: TEXT; rank 5: TEXT" of the ranks that have something to say."""
    told = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    return "; ".join(told[:at_most]) + (f"; and {len(told) - at_most} more ranks" if len(told) > at_most else "")
