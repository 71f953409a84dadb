"""Timers of the parts of a step, in the form of Megatron's log: `--timing-log-level`.

Level 1 times the parts of a step, level 2 also each micro-batch's parts. At level 0 nothing is
timed. On a GPU a timer waits for the device at its start and its end, so that it sees the work and
not its launch. This makes a step slower, which is why level 0 is the default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from megatron_lite.config.checks import chosen
from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.parallel.collectives import all_gather_first_dim, not_timed
from megatron_lite.parallel.state import ParallelState

# By Megatron's name of the timer, in the order of its log: the level from which it runs.
LEVELS = {
    "forward-backward": 1,
    "all-grads-sync": 1,
    "params-all-gather": 1,
    "optimizer-clip-main-grad": 1,
    "optimizer-inner-step": 1,
    "optimizer-copy-main-to-model-params": 1,
    "optimizer": 1,
    "batch-generator": 2,
    "forward-compute": 2,
    "backward-compute": 2,
}


class Times(NamedTuple):
    """The milliseconds of an iteration, on average since the last report.

    ranks: by the name of the timer, those of each rank. A timer that no rank has used is missing.
    option: "minmax", "max" or "all", the form of the text.
    """

    ranks: dict[str, list[float]]
    option: str

    def __str__(self) -> str:
        """Megatron's lines. Ranks that have not used a timer are left out."""
        used = {
            name: [(rank, ms) for rank, ms in enumerate(times) if ms > 0.0]
            for name, times in self.ranks.items()
        }
        if self.option == "all":
            lines = ["times across ranks (ms):"]
            for name, times in used.items():
                lines.append(f"  {name}:")
                lines += [f"     rank {rank:2d}: {ms:.2f}" for rank, ms in times]
            return "\n".join(lines)
        title = "(min, max)" if self.option == "minmax" else "max"
        lines = [f"{title} time across ranks (ms):"]
        for name, times in used.items():
            least, most = (choose(ms for _, ms in times) for choose in (min, max))
            text = f"({least:.2f}, {most:.2f})" if self.option == "minmax" else f"{most:.2f}"
            lines.append(f"    {(name + ' ').ljust(48, '.')}: {text}")
        return "\n".join(lines)


class Timers:
    """The timers of this rank. Calling an object with a name returns the context to be timed.

    clock: returns the seconds of a clock.
    """

    def __init__(
        self,
        config: LoggingConfig,
        parallel: ParallelState,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._level, self._option = config.timing_log_level, config.timing_log_option
        self._parallel, self._clock = parallel, clock
        self._seconds = {name: 0.0 for name, level in LEVELS.items() if level <= self._level}

    def __call__(self, name: str) -> AbstractContextManager[object]:
        """Returns a context manager that adds the time of its block to the timer of this name."""
        if chosen("the timer", name, LEVELS) > self._level:
            return not_timed(name)
        return self._timed(name)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = self._now()
        try:
            yield
        finally:
            self._seconds[name] += self._now() - began

    def _now(self) -> float:
        if self._parallel.device.type == "cuda":
            torch.cuda.synchronize(self._parallel.device)
        return self._clock()

    def report(self, num_iterations: int) -> Times | None:
        """Returns the times since the last report, and resets all timers.

        Every rank must call this. It issues one all-gather of a number for each timer and rank, on
        the CPU.
        num_iterations: how many iterations the times are the sum of.
        """
        own = [1000.0 * seconds / num_iterations for seconds in self._seconds.values()]
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        gathered = all_gather_first_dim(
            torch.tensor([own], dtype=torch.float64), self._parallel.world_group
        )
        ranks = {
            name: times
            for name, times in zip(self._seconds, gathered.T.tolist(), strict=True)
            if max(times) > 0.0
        }
        return Times(ranks, self._option) if ranks else None
