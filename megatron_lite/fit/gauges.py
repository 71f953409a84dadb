"""Reads the bytes that a device has given out, at marks in a step: one gauge for each way to see.

    cuda_gauge   torch's allocator counts all that is on the device; events of the GPU tell the time
    cpu_gauge    a profiler follows the allocator
    clock        the processor's time alone

A gauge is a context of a `Gauge`. The gauge of fake tensors is in megatron_lite/tools/fake_fit.py.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Reading(NamedTuple):
    """What a mark shows: the bytes then, the most since the mark before, and the time in ns."""

    num_bytes: int
    peak: int
    nanoseconds: int


class Gauge(NamedTuple):
    """What reads a device.

    mark: reads it. readings: one for each call of `mark`, once the block has ended.
    """

    mark: Callable[[], object]
    readings: list[Reading]


@contextmanager
def cuda_gauge(device: torch.device, held: object) -> Iterator[Gauge]:
    """Reads a GPU. held: not used, since the allocator counts what was there before."""
    marks, readings = list[Any](), list[Reading]()

    def mark() -> None:
        """Reads the device, without waiting for it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        memory = torch.cuda.memory_stats(device)
        marks.append(
            (memory["allocated_bytes.all.current"], memory["allocated_bytes.all.peak"], event)
        )
        torch.cuda.reset_peak_memory_stats(device)

    yield Gauge(mark, readings)
    torch.cuda.synchronize(device)
    begin = marks[0][2]
    readings += [
        Reading(now, peak, int(begin.elapsed_time(event) * 1e6)) for now, peak, event in marks
    ]


@contextmanager
def cpu_gauge(held: Callable[[], int]) -> Iterator[Gauge]:
    """Reads torch's allocator of a CPU. held: tells the model's bytes from before the block."""
    from megatron_lite.memory.measure.live_storages import allocator_peak

    there, readings = list[int](), list[Reading]()
    with allocator_peak() as found:

        def mark() -> None:
            found.mark()
            there.append(held())

        yield Gauge(mark, readings)
    readings += [
        Reading(before + now, before + peak, 0)
        for before, (now, peak) in zip(there, found.marks, strict=False)
    ]


@contextmanager
def clock() -> Iterator[Gauge]:
    """Reads the processor's time, and no bytes."""
    readings = list[Reading]()
    yield Gauge(lambda: readings.append(Reading(0, 0, time.process_time_ns())), readings)
