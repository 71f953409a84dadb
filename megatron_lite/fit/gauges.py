"""Reads the bytes that a device has given out, at marks in a step: one gauge for each way to see.

    CudaGauge   torch's allocator counts all that is on the device; events of the GPU tell the time
    CpuGauge    a profiler follows the allocator
    Clock       the processor's time alone

A gauge is a context. After it, `readings` has one reading for each call of `mark` inside. The gauge
of fake tensors is in megatron_lite/tools/fake_fit.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch


class Reading(NamedTuple):
    """What a mark shows: the bytes then, the most since the mark before, and the time in ns."""

    num_bytes: int
    peak: int
    nanoseconds: int


class Gauge(AbstractContextManager[Any], Protocol):
    """What reads a device."""

    readings: list[Reading]

    def mark(self) -> None:
        """Reads the device."""


class CudaGauge(Gauge):
    """Reads a GPU. held: not used, since the allocator counts what was there before."""

    def __init__(self, device: torch.device, held: Callable[[], int]) -> None:
        self._device = device
        self._marks: list[tuple[int, int, torch.cuda.Event]] = []

    def mark(self) -> None:
        """Reads the device, without waiting for it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        memory = torch.cuda.memory_stats(self._device)
        self._marks.append(
            (memory["allocated_bytes.all.current"], memory["allocated_bytes.all.peak"], event)
        )
        torch.cuda.reset_peak_memory_stats(self._device)

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self._device)
        self.readings = [
            Reading(now, peak, int(self._marks[0][2].elapsed_time(event) * 1e6))
            for now, peak, event in self._marks
        ]


class CpuGauge(Gauge):
    """Reads torch's allocator of a CPU. held: tells the model's bytes from before the block."""

    def __init__(self, held: Callable[[], int]) -> None:
        from megatron_lite.memory.measure.live_storages import allocator_peak

        self._block, self._held = allocator_peak(), held
        self._there: list[int] = []

    def __enter__(self) -> CpuGauge:
        self._found = self._block.__enter__()
        return self

    def mark(self) -> None:
        """Reads the allocator."""
        self._found.mark()
        self._there.append(self._held())

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)
        self.readings = [
            Reading(held + now, held + peak, 0)
            for held, (now, peak) in zip(self._there, self._found.marks, strict=False)
        ]


class Clock(Gauge):
    """Reads the processor's time, and no bytes."""

    def __init__(self) -> None:
        self.readings = []

    def mark(self) -> None:
        """Reads the clock."""
        self.readings.append(Reading(0, 0, time.process_time_ns()))

    def __exit__(self, *_: object) -> None:
        pass
