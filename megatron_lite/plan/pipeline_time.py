"""The time of a step's micro-batches through the pipeline, by running every rank's list of actions.

Each rank runs its actions in the order of pipeline/order.py, each as soon as the rank is free and
the action's input has arrived. With equal stages, and transfers that take no time, a step takes
(m + (p - 1) / v) (F + B) (2104.04473, section 2.2); the lists give the time of any other step.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron_lite.config.stages import warmup_forwards
from megatron_lite.pipeline.order import Action, orders

# The periods that must follow one another after the same time. No action needs an input that is
# older than two periods.
SETTLED = 3
ROUNDING = 1e-12  # of the longest time: the rounding of sums of floats


class Durations(NamedTuple):
    """The time of actions. duration(rank, action) is in seconds.

    transfer: the seconds that hidden states need from one rank to the next.
    overlap: whether a rank receives its next input while it computes.
    alike: whether all micro-batches take the same time.
    """

    duration: Callable[[int, Action], float]
    transfer: float = 0.0
    overlap: bool = True
    alike: bool = False


class RankEnd(NamedTuple):
    """The time at which a rank ends its last action, and how long it computed until then."""

    end: float
    busy: float


def run_pipeline(
    durations: Durations, *, size: int, num_microbatches: int, num_chunks: int = 1
) -> list[RankEnd]:
    """Returns the times of every rank.

    num_chunks: the number of virtual stages of each rank.

    If all micro-batches are alike, the schedule soon repeats: each period of p micro-batches (1
    without virtual stages) ends the same time after the one before it, on every rank. An action
    ends a constant time after the last of its inputs. Suppose that the shift by one period is the
    same for every action of several periods in a row. It then stays the same until the cool-down.
    A run with fewer micro-batches therefore gives the times of the whole run.
    """
    period = size if num_chunks > 1 else 1
    fewer = -(-(2 * size + 2) // period) * period + SETTLED * period
    while durations.alike and fewer < num_microbatches:
        short = _simulate(durations, size, fewer + (num_microbatches - fewer) % period, num_chunks)
        if (shift := short.shift(period, num_chunks)) is not None:
            # `shift` seconds for each period that was left out
            done = len(short.actions[0]) // 2 // num_chunks
            more = (num_microbatches - done) // period * shift
            return [
                RankEnd(rank.end + more, rank.busy * num_microbatches / done)
                for rank in short.ranks
            ]
        fewer *= 2
    return _simulate(durations, size, num_microbatches, num_chunks).ranks


def shortest_pipeline(
    durations: Durations, *, size: int, num_microbatches: int, num_chunks: int = 1
) -> list[RankEnd]:
    """Returns lower bounds of the times of every rank, without a simulation.

    A rank begins when the first micro-batch arrives, computes all of them, and the gradient of the
    last one passes through the ranks before it. All micro-batches must take the same time.
    """
    once = [  # by model chunk: forward and backward of rank 0, of rank 1, and so on
        [
            durations.duration(rank, Action(kind, 0, chunk))
            for rank in range(size)
            for kind in ("forward", "backward")
        ]
        for chunk in range(num_chunks)
    ]
    first = once[0]
    busy = [
        num_microbatches * sum(sum(chunk[2 * rank : 2 * rank + 2]) for chunk in once)
        for rank in range(size)
    ]
    # By rank: when the first micro-batch arrives, after the forwards of all ranks before.
    filled = [sum(first[: 2 * rank : 2]) + rank * durations.transfer for rank in range(size)]
    found = []
    for rank in range(size):
        # A later rank computes all of its micro-batches. The gradient of the last one then passes
        # through the backwards of the ranks between the two.
        end = max(
            filled[other]
            + busy[other]
            + sum(first[2 * rank + 1 : 2 * other + 1 : 2])
            + (other - rank) * durations.transfer
            for other in range(rank, size)
        )
        found.append(RankEnd(end, busy[rank]))
    return found


class _Simulation(NamedTuple):
    """The result of a simulation. ends: by rank, the time at which each action ends."""

    ranks: list[RankEnd]
    ends: list[list[float]]
    actions: list[list[Action]]

    def shift(self, period: int, num_chunks: int) -> float | None:
        """Returns the time between two periods, or None if it has not settled.

        All actions of SETTLED periods before the cool-down are compared.
        """
        length = 2 * period * num_chunks  # the actions of a rank in one period
        size = len(self.ends)
        shifts = []
        for rank, ends in enumerate(self.ends):
            cool = warmup_forwards(size=size, rank=rank, num_chunks=num_chunks)
            window = range(len(ends) - cool - SETTLED * length, len(ends) - cool)
            if window.start - length < cool:
                return None
            shifts += [ends[place] - ends[place - length] for place in window]
        low, high = min(shifts), max(shifts)
        longest = max(rank.end for rank in self.ranks)
        return low if high - low <= ROUNDING * longest else None


def _simulate(
    durations: Durations, size: int, num_microbatches: int, num_chunks: int
) -> _Simulation:
    actions = orders(size=size, num_microbatches=num_microbatches, num_chunks=num_chunks)
    ends: list[list[float]] = [[] for _ in range(size)]
    free, busy = [0.0] * size, [0.0] * size
    done: dict[tuple[str, int, int], float] = {}  # by kind, micro-batch and number of the stage
    # A rank runs until an input is missing. Whoever makes an input for another rank wakes it.
    awake = list(range(size))
    while awake:
        rank = awake.pop()
        own = actions[rank]
        while len(ends[rank]) < len(own):
            action = own[len(ends[rank])]
            stage = action.chunk * size + rank
            arrives = _arrival(action, stage, size * num_chunks, done, durations, free[rank])
            if arrives is None:
                break
            spent = durations.duration(rank, action)
            free[rank] = max(free[rank], arrives) + spent
            busy[rank] += spent
            done[action.kind, action.microbatch, stage] = free[rank]
            ends[rank].append(free[rank])
            awake.append((rank + (1 if action.kind == "forward" else -1)) % size)
    assert [*map(len, ends)] == [*map(len, actions)], "a rank waits for ever"
    return _Simulation([RankEnd(*times) for times in zip(free, busy, strict=True)], ends, actions)


def _arrival(
    action: Action,
    stage: int,
    num_stages: int,
    done: dict[tuple[str, int, int], float],
    durations: Durations,
    free: float,
) -> float | None:
    """Returns when the input of an action arrives, or None if it has not been made.

    free: the time from which the rank can run the action.
    """
    before = stage - 1 if action.kind == "forward" else stage + 1
    if not 0 <= before < num_stages:
        return 0.0
    made = done.get((action.kind, action.microbatch, before))
    if made is None:
        return None
    # Without overlap the rank begins to receive when it is free.
    return (made if durations.overlap else max(made, free)) + durations.transfer
