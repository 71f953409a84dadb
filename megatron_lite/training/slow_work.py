"""Rank 0 prints that long work before the training is still running (parallel/messages.py)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from megatron_lite.parallel.messages import FIRST_AFTER_S, GROWTH, print_line, told_if_slow
from megatron_lite.parallel.state import ParallelState

__all__ = ["FIRST_AFTER_S", "GROWTH", "told_by_rank_0", "told_if_slow"]


def told_by_rank_0(what: str, parallel: ParallelState) -> AbstractContextManager[None]:
    """Returns the context of work before the log is open. Rank 0 prints its lines."""
    return nullcontext() if parallel.rank else told_if_slow(what, print_line)
