"""The most bytes that torch's CPU allocator has given out at once during a block.

The figure has every tensor, with the allocator's rounding, also the copies inside gloo's
collectives. It does not have memory that a library allocates by itself. Memory that a thread of
gloo frees counts until it is used again, so the figure can be too high with several ranks on CPUs.
The first use in a process takes about a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class AllocatorPeak:
    """The result of `allocator_peak`, which is known once the block has ended.

    peak_bytes: the most bytes that the block had allocated at once. Freeing memory that is older
        than the block counts 0.
    """

    peak_bytes = 0


@contextmanager
def allocator_peak() -> Iterator[AllocatorPeak]:
    """Yields the peak of the block."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it prints when it starts and stops
    from torch.profiler import ProfilerActivity, profile

    found = AllocatorPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield found
    events: list[tuple[int, int, int]] = []
    pending: list[Any] = list(profiled.profiler.kineto_results.experimental_event_tree())
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
            # The profiler does not see what a thread of gloo frees. Its memory is used again.
            total += size - alive.get(address, 0)
            alive[address] = size
        else:
            total -= alive.pop(address, 0)
        found.peak_bytes = max(found.peak_bytes, total)
