"""Where a rank is, and what ends its run early: an interval, a duration, or a signal.

All ranks decide alike, after the same iteration. Before the first iteration the run has nothing to
save. During that time a signal ends this rank at once, and watch.py ends the other ranks.

At the end of the module: why a run ends, decided from two readings of the beats of every rank
(watch.py reads them).

    the two beats are equal    the rank is gone or stopped
    the beat is "left"         the rank has ended by itself

torchrun passes SIGTERM on to its ranks, waits 30 s (--shutdown-timeout) and kills them. SIGUSR1 and
SIGUSR2 kill torchrun itself, unless it is started with
--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2. It then passes these on too.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_lite.config.training import TrainingConfig
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.messages import ranks_text
from megatron_lite.parallel.signals import Stopped
from megatron_lite.parallel.state import ParallelState

# Ranks agree by the maximum: a signal counts as its number + 1, so it wins over the time.
GO_ON, TIME_IS_UP = 0, 1
START_UP = "start-up"
# The signals that launchers and batch systems send: on these --exit-signal-handler saves even
# without --exit-signal.
SAVING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LEFT = "left"


class Pulse:
    """The place where a rank is, and the time that it may stay there.

    where: the place, for messages.
    moves: how often the place has changed.
    longest: the seconds of the longest limited stretch between two moves.
    saved: the newest durable step of the run; None if there is none.
    clock: returns the seconds of a clock that never goes back.

    A stretch is limited if no later stretch should take much longer. The first iteration and the
    first evaluation, which compile, and the writing of a checkpoint are not limited. If the batch
    grows (--rampup-batch-size), an iteration may take longer by the same factor.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.where, self.moves, self.longest = START_UP, 0, 0.0
        self.saved: Path | None = None
        self._clock, self._limited, self._since = clock, False, clock()

    def at(self, where: str, *, limited: bool = True, growth: float = 1.0) -> None:
        """Records that the rank begins a new stretch.

        limited: whether the stretch has a time limit.
        growth: the work of this stretch divided by that of the stretch before, if it is more.
        """
        now = self._clock()
        # Without any measured stretch, the first iteration (unlimited) still serves to be scaled.
        if self._limited or (growth > 1.0 and not self.longest):
            self.longest = max(self.longest, now - self._since)
        self.longest *= growth
        # Set before _limited, because the watch thread reads both: it must never combine the new
        # limit with the old start.
        self._since = now
        self.where, self._limited = where, limited
        self.moves += 1

    def seconds_left(self, timeout: float) -> float | None:
        """Returns the seconds until this stretch exceeds its limit; None if it is not limited.

        The limit is `timeout` seconds more than the longest limited stretch before it.
        """
        return timeout + self.longest - (self._clock() - self._since) if self._limited else None


class Exits:
    """The reasons for which a run may end early.

    Create it when the run starts: the run's duration counts from that time.
    pulse: where this rank is. The training loop writes it and a watch reads it.
    """

    def __init__(self, config: TrainingConfig, parallel: ParallelState) -> None:
        self._limit, self._parallel = config.exit_duration_in_mins, parallel
        self._started, self.pulse = time.monotonic(), Pulse()
        self._heard = set[signal.Signals]()
        if config.exit_signal_handler:
            self._heard = {*SAVING, signal.Signals[config.exit_signal]}
        self._signalled = 0
        self._trains = False

    def listen(self) -> dict[signal.Signals, object]:
        """Handles the signals of --exit-signal-handler, if it is given, so that they do not kill.

        Before `begin` a signal raises Stopped; later it is noted. Returns the handlers that
        this call replaces.
        """
        return {number: signal.signal(number, self._note) for number in self._heard}

    @contextmanager
    def listening(self) -> Iterator[Exits]:
        """Calls `listen` for the time of a block, and restores the handlers afterwards."""
        before = self.listen()
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]

    def begin(self) -> None:
        """Marks the start of training: from here on a signal is noted and no longer raises."""
        self._trains = True

    def finish(self) -> None:
        """Ignores the signals from here on; call it when the run is over and everything is saved.

        Another signal would otherwise kill this process while it leaves its groups or while Python
        ends. The exit status would be that of a failed run.
        """
        for number in self._heard:
            signal.signal(number, signal.SIG_IGN)

    def now(self) -> str | None:
        """Returns why the run must end at this point; None if it goes on.

        Every rank must call this at the same points. It issues one all-reduce of one number on the
        CPU, but only if a signal or a duration can end the run. It does not wait for the device.
        """
        limit, found = self._limit, GO_ON
        if limit is None and not self._heard:
            return None
        if limit is not None and time.monotonic() - self._started > 60.0 * limit:
            found = TIME_IS_UP
        if self._signalled:
            found = self._signalled + 1
        group = self._parallel.world_group
        agreed = int(all_reduce_(torch.tensor(found), group, dist.ReduceOp.MAX).item())
        if agreed == GO_ON:
            return None
        if agreed == TIME_IS_UP:
            return f"--exit-duration-in-mins {limit}"
        return f"{signal.Signals(agreed - 1).name} (--exit-signal-handler)"

    def _note(self, number: int, _: object) -> None:
        first, self._signalled = not self._signalled, number
        if first and not self._trains:  # a second signal must not disturb the way out
            raise Stopped(number)


class Verdict(NamedTuple):
    """The reason why a run ends.

    rank: the rank that reports it.
    status: the exit status of every process.
    text: the message.
    with_stacks: whether every rank prints the stacks of its threads.
    """

    rank: int
    status: int
    text: str
    with_stacks: bool = False


@dataclass
class Trouble:
    """The event that makes a rank look for ranks that are not alive.

    what: "lost" (a connection broke), "late" (no progress, or a timeout) or "signal".
    number: the number of the signal.
    before: the beats of the ranks at the time `since`.
    """

    what: str
    number: int = 0
    since: float = 0.0
    before: dict[int, str] = field(default_factory=dict)


def judge(
    trouble: Trouble, beats: Mapping[int, str], rank: int, *, timeout: float, graceful: bool
) -> Verdict | None:
    """Returns the verdict of `rank`; None if the run goes on.

    It goes on if no rank is missing and the training loop handles the signal.

    beats: the beats of every rank, this one too, read later than those in `trouble`.
    timeout: the limit in seconds that the message names.
    graceful: whether a signal ends the run after an iteration, by the training loop.
    """
    # A rank that ends by itself writes "left" and no more beats, so it must not count as silent.
    silent = [other for other, beat in beats.items() if beat == trouble.before[other] != LEFT]
    gone = [other for other, beat in beats.items() if beat == LEFT]
    if trouble.what == "signal" and not silent:
        # Ctrl-C raises KeyboardInterrupt, unless --exit-signal SIGINT handles it.
        interrupts = trouble.number == signal.SIGINT and (
            signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        return None if graceful and not interrupts else stopped_by(trouble.number, rank)
    ended = _of(gone, "has", "have") + " ended"
    if trouble.what == "late":
        who = ended if gone else _slowest(beats)
        if silent:
            who = _of(silent, "gives", "give") + " no sign of life"
        return Verdict(rank, 1, f"no progress for more than {timeout:g} s: {who}", with_stacks=True)
    text = "a connection to another rank broke, though all are alive"
    if gone:
        text = f"{ended}, with a message"
    if silent:
        text = _of(silent, "is", "are") + " gone"
    return Verdict(rank, 1, text)


def stopped_by(number: int, rank: int) -> Verdict:
    """Returns the verdict of a rank that a signal has reached. It names the flags that save."""
    name = signal.Signals(number).name
    flags = "--exit-signal-handler" + ("" if number in SAVING else f" --exit-signal {name}")
    return Verdict(
        rank,
        128 + number,
        f"{name}; no checkpoint is written for it (--save with {flags} writes one)",
    )


def _of(ranks: Sequence[int], one: str, several: str) -> str:
    """Returns the subject and verb of a message: "rank 1 is", "ranks 1, 5 are"."""
    return f"{ranks_text(ranks)} {several if len(ranks) > 1 else one}"


def _slowest(beats: Mapping[int, str]) -> str:
    """Returns which ranks have moved least, if all ranks are alive."""
    moves = {rank: int(beat.split(" ", 2)[1]) for rank, beat in beats.items() if beat}
    behind = [rank for rank in moves if moves[rank] == min(moves.values())]
    if len(behind) == len(beats):
        return "every rank is alive, and none is behind"
    return f"{_of(behind, 'is', 'are')} behind, at {beats[behind[0]].split(' ', 2)[2]}"
