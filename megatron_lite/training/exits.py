"""What ends a run before its end: an interval, its duration, a signal. Every rank decides alike, after the same iteration."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_lite.config.training import TrainingConfig
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.state import ParallelState

GO_ON, TIME_IS_UP, SIGNALLED = 0, 1, 2


class Exits:
    """Made when the run starts: its duration counts from then on."""

    def __init__(self, config: TrainingConfig, parallel: ParallelState) -> None:
        self._config, self._parallel = config, parallel
        self._started = time.monotonic()
        self._signalled = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, `--exit-signal` does not kill this process but is noted, where `--exit-signal-handler` asks for it."""
        if not self._config.exit_signal_handler:
            yield
            return
        before = signal.signal(signal.Signals[self._config.exit_signal], self._note)
        try:
            yield
        finally:
            signal.signal(signal.Signals[self._config.exit_signal], before)

    def reason(self, iteration: int) -> str | None:
        """Why the run ends after this iteration, if it does. Every rank must ask after every iteration.

        One all-reduce of one number, and a wait for the device, only where a signal or a duration can end the run.
        """
        config = self._config
        if config.exit_interval is not None and iteration % config.exit_interval == 0:
            return f"--exit-interval {config.exit_interval}"
        if not config.exit_signal_handler and config.exit_duration_in_mins is None:
            return None
        found = torch.tensor(self._found(), device=self._parallel.device)
        agreed = all_reduce_(found, self._parallel.world_group, dist.ReduceOp.MAX).item()
        return {TIME_IS_UP: f"--exit-duration-in-mins {config.exit_duration_in_mins}",
                SIGNALLED: f"{config.exit_signal} (--exit-signal-handler)"}.get(int(agreed))

    def _found(self) -> int:
        limit = self._config.exit_duration_in_mins
        if self._signalled:
            return SIGNALLED
        return TIME_IS_UP if limit is not None and time.monotonic() - self._started > 60.0 * limit else GO_ON

    def _note(self, *_: object) -> None:
        self._signalled = True
