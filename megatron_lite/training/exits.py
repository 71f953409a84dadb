"""What ends a run before its end: an interval, its duration, a signal. Every rank decides alike, after the same iteration.

Before the first iteration there is nothing to agree on and nothing to save: there a signal ends this rank at once, and watch.py
tells the others. torchrun hands on SIGTERM, waits 30 s (--shutdown-timeout) and kills; of SIGUSR1 and SIGUSR2 it dies itself,
unless --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 makes it hand them on too.
"""

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

GO_ON, TIME_IS_UP = 0, 1  # a signal counts as its number + 1, and before the time
ALWAYS_HEARD = ("SIGTERM", "SIGUSR1", "SIGUSR2")  # what launchers and batch systems send; --exit-signal adds another


class StoppedEarly(BaseException):
    """A signal came before the first iteration. Like KeyboardInterrupt not an Exception: nothing on its way may swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name} (--exit-signal-handler)")
        self.number = number


class Exits:
    """Made when the run starts: its duration counts from then on."""

    def __init__(self, config: TrainingConfig, parallel: ParallelState) -> None:
        self._config, self._parallel = config, parallel
        self._started = time.monotonic()
        self._signalled = 0
        self._trains = False

    def listen(self) -> dict[signal.Signals, object]:
        """From now on the signals of --exit-signal-handler, where it is given, do not kill this process: before `begin` they
        raise StoppedEarly, later they are noted. Returns the handlers that were there before."""
        if not self._config.exit_signal_handler:
            return {}
        names = dict.fromkeys((*ALWAYS_HEARD, self._config.exit_signal))
        return {signal.Signals[name]: signal.signal(signal.Signals[name], self._note) for name in names}

    @contextmanager
    def listening(self) -> Iterator[Exits]:
        """`listen` for the time of a block."""
        before = self.listen()
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]

    def begin(self) -> None:
        """From now on there is something to lose."""
        self._trains = True

    def at_interval(self, iteration: int) -> str | None:
        """Why a run ends after this iteration whatever happens, if it does."""
        interval = self._config.exit_interval
        return f"--exit-interval {interval}" if interval is not None and iteration % interval == 0 else None

    def now(self) -> str | None:
        """Why the run is to end at this point, if it is. Every rank must ask at the same points.

        One all-reduce of one number, and a wait for the device, only where a signal or a duration can end the run.
        """
        config = self._config
        if not config.exit_signal_handler and config.exit_duration_in_mins is None:
            return None
        found = torch.tensor(self._found(), device=self._parallel.device)
        agreed = int(all_reduce_(found, self._parallel.world_group, dist.ReduceOp.MAX).item())
        if agreed == GO_ON:
            return None
        if agreed == TIME_IS_UP:
            return f"--exit-duration-in-mins {config.exit_duration_in_mins}"
        return f"{signal.Signals(agreed - 1).name} (--exit-signal-handler)"

    def _found(self) -> int:
        limit = self._config.exit_duration_in_mins
        if self._signalled:
            return self._signalled + 1
        return TIME_IS_UP if limit is not None and time.monotonic() - self._started > 60.0 * limit else GO_ON

    def _note(self, number: int, _: object) -> None:
        first, self._signalled = not self._signalled, number
        if first and not self._trains:  # a second signal must not disturb the way out
            raise StoppedEarly(number)
