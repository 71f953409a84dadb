"""Which ranks hold the others up: `--log-straggler` names them at each log interval, with their time over the median's.

A step takes equally long on all ranks, since they wait for each other. What a rank itself needs is

    on a CPU    the wall time of a step without the time in which its main thread waits in a collective: of the interval's steps
                the median, so that one hiccup names nobody. Reading data and whatever else runs on the processor count.
    on a GPU    the time of a fixed matmul, timed by events behind the interval's last step: a GPU that is throttled, or shared.

Ranks are compared with those of their pipeline stage alone, as stages differ in their work; a stage of one rank is not judged.
Rank 0's log is outside of what is timed. Waiting is seen at torch's `Work.wait`, where every collective that waits on the CPU
ends (FSDP2's too), so that nothing is timed, and nothing costs, without the flag. Collectives whose results a policy of operators
may keep wait elsewhere: under `ops(..)` their waiting counts, and a slow rank may go unnamed.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.training import LoggingConfig
from megatron_lite.parallel.collectives import all_gather_first_dim
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.texts import gather_texts
from megatron_lite.pipeline.links import Links

PROBE_SIZE, PROBE_MATMULS = 4096, 8


class RankTime(NamedTuple):
    """What one rank needed for its share of a step."""

    rank: int
    stage: int
    host: str
    ms: float


def slow_ranks(times: Sequence[RankTime], *, ratio: float, at_most: int) -> list[str]:
    """A line for each of the slowest ranks that took more than `ratio` times the median of their stage.

    The median is the lower one of an even number: of two ranks the faster.
    """
    found = []
    for one in times:
        stage = [other.ms for other in times if other.stage == one.stage]
        median = statistics.median_low(stage)
        if len(stage) > 1 and median > 0.0 and one.ms > ratio * median:
            part = "" if len(stage) == len(times) else f" of pipeline rank {one.stage}"
            found.append((one.ms / median, f"slow rank: {one.rank} ({one.host}) {one.ms / median:.1f}x the median of "
                          f"{len(stage)} ranks{part} ({one.ms:.1f} ms against {median:.1f} ms)"))
    return [line for _, line in sorted(found, key=lambda pair: -pair[0])[:at_most]]


class SlowRanks:
    """Times this rank's steps. Use `listening` around the run, `step` around each step, `lines` at each log interval."""

    def __init__(self, config: LoggingConfig, parallel: ParallelState, links: Links | None) -> None:
        self._config, self._parallel, self._links = config, parallel, links
        self._hosts = gather_texts(socket.gethostname(), parallel)
        self._waited, self._ms = 0.0, list[float]()
        self._main = threading.get_ident()
        self._probe: _Probe | None = _Probe(parallel.device) if parallel.device.type == "cuda" else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the time that this thread spends in `Work.wait` is added up, of a run on a CPU."""
        wait: Callable[..., Any] = dist.Work.wait

        def timed(work: dist.Work, *timeout: Any) -> Any:
            if threading.get_ident() != self._main:  # a pipeline's sends have threads of their own
                return wait(work, *timeout)
            start = time.perf_counter()
            try:
                return wait(work, *timeout)
            finally:
                self._waited += time.perf_counter() - start

        if self._probe is None:
            dist.Work.wait = timed  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            dist.Work.wait = wait  # type: ignore[method-assign]

    @contextmanager
    def step(self, *, logged: bool) -> Iterator[None]:
        """Times what runs inside, or begins the GPU's probe behind a step that will be logged."""
        if self._probe is not None:
            yield
            if logged:
                self._probe.start()
            return
        start, waited = time.perf_counter(), self._seconds_waited()
        yield
        self._ms.append(1000.0 * (time.perf_counter() - start - (self._seconds_waited() - waited)))

    def lines(self) -> list[str]:
        """Who was slow since the last call. Every rank must call; one all-gather of one number, on the CPU."""
        own = statistics.median(self._ms) if self._probe is None else self._probe.ms()
        self._ms.clear()
        parallel = self._parallel
        gathered = all_gather_first_dim(torch.tensor([[own, parallel.pp_rank]], dtype=torch.float64), parallel.world_group)
        times = [RankTime(rank, int(stage), host, ms) for rank, (host, (ms, stage))
                 in enumerate(zip(self._hosts, gathered.tolist(), strict=True))]
        return slow_ranks(times, ratio=self._config.straggler_ratio, at_most=self._config.straggler_minmax_count)

    def _seconds_waited(self) -> float:
        return self._waited + (0.0 if self._links is None else self._links.waited_s)

    def notice(self) -> str | None:
        """Where there is nobody to compare with."""
        if self._parallel.world_size == self._parallel.pp_size:
            return "--log-straggler names nobody: it compares the ranks of a pipeline stage, and each has one"
        return None


class _Probe:
    """A few matmuls of bf16, timed on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._operand: Tensor = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=torch.bfloat16, device=device) / PROBE_SIZE
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
