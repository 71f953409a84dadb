"""Finds ranks that hold the others up: `--log-straggler` names them at each log interval.

The log gives a rank's time as a multiple of the median. A step takes equally long on all ranks,
because they wait for each other. Therefore the time that a rank itself needs is measured:

- On a CPU it is the wall time of a step without the time in which the main thread waits in a
  collective. The figure is the median over the steps of the interval, so that one slow step names
  no rank. Reading data and all other work on the processor count.
- On a GPU it is the time of a fixed matmul, timed by events after the interval's last step. It
  finds a GPU that is throttled or shared.

A rank is compared only with the ranks of its pipeline stage, because stages differ in their work. A
stage of one rank is not judged. Rank 0's logging is not timed. parallel/collectives.py times the
waits at the end of the project's collectives; without the flag it reads no clock. A torch without
custom collectives for FSDP2 (parallel/fsdp.py) waits elsewhere. With such a torch the waiting of
FSDP2 counts as work, and a slow rank may remain unnamed.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.parallel.collectives import WAITING, all_gather_first_dim, timed_waiting
from megatron_lite.parallel.state import ParallelState, gather_texts

PROBE_SIZE, PROBE_MATMULS = 4096, 8


class RankTime(NamedTuple):
    """The time in ms that one rank needed for its part of a step. stage: its pipeline rank."""

    rank: int
    stage: int
    host: str
    ms: float


def slow_ranks(times: Sequence[RankTime], *, ratio: float, at_most: int) -> list[str]:
    """Returns a line for each of the slowest ranks, at most `at_most` of them.

    A rank is slow if it took more than `ratio` times the median of its stage. For an even number of
    ranks the median is the lower of the two middle times: of two ranks, the faster one's.
    """
    found = []
    for one in times:
        stage = [other.ms for other in times if other.stage == one.stage]
        median = statistics.median_low(stage)
        if len(stage) > 1 and median > 0.0 and one.ms > ratio * median:
            part = "" if len(stage) == len(times) else f" of pipeline rank {one.stage}"
            found.append(
                (
                    one.ms / median,
                    f"slow rank: {one.rank} ({one.host}) {one.ms / median:.1f}x the median of "
                    f"{len(stage)} ranks{part} ({one.ms:.1f} ms against {median:.1f} ms)",
                )
            )
    return [line for _, line in sorted(found, key=lambda pair: -pair[0])[:at_most]]


class SlowRanks:
    """The timing of this rank's steps.

    Use `listening` around the run, `step` around each step, and `lines` at each log interval.
    """

    def __init__(self, config: LoggingConfig, parallel: ParallelState) -> None:
        self._config, self._parallel = config, parallel
        self._hosts = gather_texts(socket.gethostname(), parallel)
        self._ms: list[float] = []
        self._probe: _Probe | None = (
            _Probe(parallel.device) if parallel.device.type == "cuda" else None
        )

    def listening(self) -> AbstractContextManager[None]:
        """Returns a context manager; on a CPU it adds up this thread's waits for other ranks."""
        return timed_waiting() if self._probe is None else nullcontext()

    @contextmanager
    def step(self, *, logged: bool) -> Iterator[None]:
        """Times the block on a CPU; on a GPU, starts the probe after a step that will be logged."""
        if self._probe is not None:
            yield
            if logged:
                self._probe.start()
            return
        # WAITING is local to a thread, so the waits of a save in another thread do not count.
        start, waited = time.perf_counter(), WAITING.seconds
        yield
        self._ms.append(1000.0 * (time.perf_counter() - start - (WAITING.seconds - waited)))

    def lines(self) -> list[str]:
        """Returns a line for each rank that was slow since the last call.

        Every rank must call this. It issues one all-gather of two numbers per rank, on the CPU.
        """
        own = statistics.median(self._ms) if self._probe is None else self._probe.ms()
        self._ms.clear()
        parallel = self._parallel
        gathered = all_gather_first_dim(
            torch.tensor([[own, parallel.pp_rank]], dtype=torch.float64), parallel.world_group
        )
        times = [
            RankTime(rank, int(stage), host, ms)
            for rank, (host, (ms, stage)) in enumerate(
                zip(self._hosts, gathered.tolist(), strict=True)
            )
        ]
        return slow_ranks(
            times, ratio=self._config.straggler_ratio, at_most=self._config.straggler_minmax_count
        )


class _Probe:
    """A few bfloat16 matmuls, timed on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._operand: Tensor = (
            torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=torch.bfloat16, device=device) / PROBE_SIZE
        )
        self._result = torch.empty_like(self._operand)
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.start()  # cuBLAS chooses its kernel at the first call

    def start(self) -> None:
        self._start.record()
        for _ in range(PROBE_MATMULS):
            torch.matmul(self._operand, self._operand, out=self._result)
        self._stop.record()

    def ms(self) -> float:
        self._stop.synchronize()
        return self._start.elapsed_time(self._stop)
