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

MARK = "megatron_lite: mark of allocated bytes"


class AllocatorPeak:
    """The result of `allocator_peak`, which is known once the block has ended.

    peak_bytes: the most bytes that the block had allocated at once. Freeing memory that is older
        than the block counts 0.
    marks: the bytes at each call of `mark`, and the most bytes since the call before.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.marks: list[tuple[int, int]] = []

    def mark(self) -> None:
        """Marks this moment of the block."""
        from torch.profiler import record_function

        with record_function(MARK):
            pass


@contextmanager
def allocator_peak() -> Iterator[AllocatorPeak]:
    """Yields the peak of the block."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it prints when it starts and stops
    from torch.profiler import ProfilerActivity, profile

    found = AllocatorPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield found
    # (time, address, bytes); a mark has no bytes
    events = []
    pending = list(profiled.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if type(event.extra_fields).__name__.endswith("Allocation"):
            events.append(
                (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
            )
        elif event.name == MARK:
            events.append((event.start_time_ns, 0, 0))
    # The profiler keeps events as a tree of calls. In the order of time a negative size is a free.
    alive: dict[int, int] = {}
    total = highest = 0
    for _, address, size in sorted(events, key=lambda event: event[0]):
        if size > 0:
            # The profiler does not see what a thread of gloo frees. Its memory is used again.
            total += size - alive.get(address, 0)
            alive[address] = size
        elif size < 0:
            total -= alive.pop(address, 0)
        else:
            found.marks.append((total, highest))
            highest = total
        highest = max(highest, total)
        found.peak_bytes = max(found.peak_bytes, total)
