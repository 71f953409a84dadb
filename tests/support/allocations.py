"""Counts the bytes that torch's CPU allocator allocates in a block.

The count includes the copies inside gloo's collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity


class Allocations:
    """The result of `allocations`, which is known once the block has ended.

    peak_bytes: the most bytes that were allocated at once since the block began.
    """

    peak_bytes = 0


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Yields the allocations of the block. Freeing memory that is older than the block counts 0."""
    found = Allocations()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        yield found
    events: list[tuple[int, int, int]] = []
    pending: list[Any] = list(profile.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if type(event.extra_fields).__name__.endswith("Allocation"):
            events.append(
                (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
            )
    # The profiler keeps events as a tree of calls. In the order of time a negative size is a free.
    alive: dict[int, int] = {}
    total = 0
    for _, address, size in sorted(events, key=lambda event: event[0]):
        if size > 0:
            alive[address] = size
            total += size
        else:
            total -= alive.pop(address, 0)
        found.peak_bytes = max(found.peak_bytes, total)
