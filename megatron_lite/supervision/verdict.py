"""Decides why a run ends, from two readings of the beats of every other rank.

    the two beats are equal    the rank is gone or stopped
    the beat is "left"         the rank has ended by itself

The functions are pure; watch.py reads the beats.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lite.parallel.messages import ranks_text

# The signals that launchers and batch systems send: on these --exit-signal-handler saves even
# without --exit-signal.
SAVING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LEFT = "left"


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
    before: the beats of the other ranks at the time `since`.
    """

    what: str
    number: int = 0
    since: float = 0.0
    before: dict[int, str] | None = None


def judge(
    trouble: Trouble,
    beats: Mapping[int, str],
    own_beat: str,
    rank: int,
    *,
    timeout: float,
    graceful: bool,
) -> Verdict | None:
    """Returns the verdict of `rank`; None if the run goes on.

    It goes on if no rank is missing and the training loop handles the signal.

    beats: the beats of every other rank, read later than those in `trouble`.
    own_beat: the beat of this rank.
    timeout: the limit in seconds that the message names.
    graceful: whether a signal ends the run after an iteration, by the training loop.
    """
    assert trouble.before is not None
    # A rank that ends by itself writes "left" and no more beats, so it must not count as silent.
    silent = [other for other, beat in beats.items() if beat == trouble.before[other] != LEFT]
    gone = [other for other, beat in beats.items() if beat == LEFT]
    if trouble.what == "signal" and not silent:
        # Ctrl-C raises KeyboardInterrupt, unless --exit-signal SIGINT handles it.
        interrupts = trouble.number == signal.SIGINT and (
            signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        return None if graceful and not interrupts else stopped_by(trouble.number, rank)
    if trouble.what == "late":
        if silent:
            who = _of(silent, "gives", "give") + " no sign of life"
        elif gone:
            who = _of(gone, "has", "have") + " ended"
        else:
            who = _slowest({rank: own_beat, **beats})
        return Verdict(rank, 1, f"no progress for more than {timeout:g} s: {who}", with_stacks=True)
    if silent:
        return Verdict(rank, 1, _of(silent, "is", "are") + " gone")
    if gone:
        return Verdict(rank, 1, _of(gone, "has", "have") + " ended, with a message")
    return Verdict(rank, 1, "a connection to another rank broke, though all are alive")


def stopped_by(number: int, rank: int) -> Verdict:
    """Returns the verdict of a rank that a signal has reached. It names the flags that save."""
    name = signal.Signals(number).name
    flags = "--exit-signal-handler" + ("" if number in SAVING else f" --exit-signal {name}")
    return Verdict(
        rank, 128 + number, f"{name}; no checkpoint is written (with --save, {flags} writes one)"
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
