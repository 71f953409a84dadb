"""The names of ranks in messages."""

from __future__ import annotations

from collections.abc import Iterable


def ranks_text(ranks: Iterable[int], *, at_most: int | None = None) -> str:
    """Returns `rank 3`, `ranks 0, 1` or `ranks 0-3, 8`.

    at_most: the greatest number of runs of consecutive ranks that are named; the rest is counted.
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = runs[:at_most]
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in named]
    more = sum(map(len, runs)) - sum(map(len, named))
    several = sum(map(len, runs)) > 1
    return f"rank{'s' if several else ''} {', '.join(parts)}" + (
        f" and {more} more" if more else ""
    )
