"""Short texts that ranks tell each other: where a fault is, what a host is called. Not for the step: they wait for the device."""

from __future__ import annotations

import torch

from megatron_lite.parallel.collectives import all_gather_first_dim
from megatron_lite.parallel.state import ParallelState

LENGTH = 192  # bytes; what is longer is cut


def gather_texts(text: str, parallel: ParallelState) -> list[str]:
    """Every rank's text, by rank. One all-gather of LENGTH bytes over all ranks."""
    own = torch.zeros(1, LENGTH, dtype=torch.uint8)
    data = text.encode()[:LENGTH]
    own[0, : len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    gathered = all_gather_first_dim(own.to(parallel.device), parallel.world_group).cpu()
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in gathered]


def by_rank(texts: list[str], *, at_most: int = 8) -> str:
    """"rank 3: TEXT; rank 5: TEXT" of the ranks that have something to say."""
    told = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    return "; ".join(told[:at_most]) + (f"; and {len(told) - at_most} more ranks" if len(told) > at_most else "")
