"""Supervision of a run: watches over the ranks, and turns each error into an exit status.

It lasts from when the ranks have joined the process groups until they leave them.

    error of the body            reported by                          exit status
    none                                                              0
    TrainingError                rank 0                               1
    RecomputeMismatch            each rank that finds one             1
    InputError                   the first rank that meets one        2
    any other                    the rank that failed (watch.py)      1
    a signal, Ctrl-C             the rank that it reached first       128 + its number

The last two rows end the process at once: the process groups of a broken run cannot be left in an
orderly way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_lite.cli.preparation import start_lines
from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.config.invocation import SCRIPT
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.one_voice import print_fault
from megatron_lite.parallel.state import ParallelState
from megatron_lite.recompute.verify import RecomputeMismatch
from megatron_lite.supervision.exits import Exits, StoppedEarly
from megatron_lite.supervision.pulse import Pulse
from megatron_lite.supervision.watch import Watch
from megatron_lite.training.run_notices import run_notices
from megatron_lite.training.step import TrainingError
from megatron_lite.training.terminal import print_lines


@dataclass
class Supervision:
    """The parts of the supervision that a trainer needs.

    status: the exit status, valid once the run has ended.
    """

    config: RunConfig
    parallel: ParallelState
    exits: Exits
    pulse: Pulse
    status: int = 0

    def start(self, notices: Sequence[str]) -> tuple[str, ...]:
        """Installs the signal handlers of --exit-signal-handler, if it is given.

        Rank 0 prints the notices of the run and its settings. Returns these notices, for the log
        file; none on other ranks.

        notices: the notices of the command line.
        """
        # The context manager itself must not listen: a signal that arrives before the body begins
        # would raise outside of every handler.
        self.exits.listen()
        if self.parallel.rank != 0:
            return ()
        found = run_notices(
            self.config,
            device=self.parallel.device.type,
            world_size=self.parallel.world_size,
            of_settings=notices,
        )
        print_lines([*found.at_start, *start_lines(self.config, self.parallel)])
        return found.at_start


@contextmanager
def supervised(
    config: RunConfig, parallel: ParallelState, launch: Launch, program: str = SCRIPT
) -> Iterator[Supervision]:
    """Watches over the ranks during the block.

    program: the name with which each message begins.

    An error that ends the block becomes an exit status, by the table of this module.
    """
    exits = Exits(config.training, parallel)
    with Watch(
        parallel,
        timeout=config.parallel.timeout_seconds,
        graceful=config.training.exit_signal_handler,
        owns_store=not launch.agent_owns_store,
        program=program,
    ) as watch:
        supervision = Supervision(config, parallel, exits, watch.pulse)
        # The outer try also catches a signal that arrives while the inner one reports an error.
        try:
            try:
                yield supervision
            except Exception as error:
                status = _status_after(error, exits, watch, parallel.rank, program)
                if status is None:
                    raise
                supervision.status = status
        except StoppedEarly as stopped:
            watch.leave(watch.stop(stopped))
        except KeyboardInterrupt:
            watch.leave(watch.interrupt())
        exits.finish()


def _status_after(
    error: Exception, exits: Exits, watch: Watch, rank: int, program: str
) -> int | None:
    """Reports the error and returns the exit status, or ends the process.

    Returns None if Python should report the error with its traceback.
    """
    if isinstance(error, TrainingError):
        if rank == 0:
            print_fault(error, rank, program=program)
        return 1
    if isinstance(error, RecomputeMismatch):
        text = f"--recompute-verify: {error}"
        print_fault(text, rank, program=program, always_named=True)
        return 1
    exits.begin()  # a signal from the launcher must not disturb what follows
    if isinstance(error, InputError):
        # This rank reports before it leaves the groups: leaving ends the ranks that wait for it.
        if watch.is_first_to_say(str(error), after_others=isinstance(error, PeerError)):
            print_fault(error, rank, program=program)
        return 2
    verdict = watch.explain(error)
    if verdict is None:
        return None
    watch.leave(verdict)
