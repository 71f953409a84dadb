"""The time of a step's micro-batches through the pipeline, by running every rank's list of actions.

Each rank runs its actions in the order of pipeline/order.py, each as soon as the rank is free and
the action's input has arrived. With equal stages, and transfers that take no time, a step takes
(m + (p - 1) / v) (F + B) (2104.04473, section 2.2); the lists give the time of any other step.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_lite.pipeline.order import Action, order


class Durations(NamedTuple):
    """The time of actions. duration(rank, action) is in seconds.

    transfer: the seconds that hidden states need from one rank to the next.
    overlap: whether a rank receives its next input while it computes.
    """

    duration: Callable[[int, Action], float]
    transfer: float = 0.0
    overlap: bool = True


class RankTime(NamedTuple):
    """The time at which a rank ends its last action, and how long it computed until then."""

    end: float
    busy: float


def run_pipeline(
    durations: Durations, *, size: int, num_microbatches: int, num_chunks: int = 1
) -> list[RankTime]:
    """Returns the times of every rank.

    num_chunks: the number of virtual stages of each rank.
    """
    actions = [
        order(size=size, rank=rank, num_microbatches=num_microbatches, num_chunks=num_chunks)
        for rank in range(size)
    ]
    positions, ends, busy = [0] * size, [0.0] * size, [0.0] * size
    done: dict[tuple[str, int, int], float] = {}  # by kind, micro-batch and number of the stage
    # A rank runs until an input is missing. Whoever makes an input for another rank wakes it.
    awake = list(range(size))
    while awake:
        rank = awake.pop()
        own = actions[rank]
        while positions[rank] < len(own):
            action = own[positions[rank]]
            stage = action.chunk * size + rank
            arrives = _arrival(action, stage, size * num_chunks, done, durations, ends[rank])
            if arrives is None:
                break
            spent = durations.duration(rank, action)
            ends[rank] = max(ends[rank], arrives) + spent
            busy[rank] += spent
            done[action.kind, action.microbatch, stage] = ends[rank]
            positions[rank] += 1
            awake.append((rank + (1 if action.kind == "forward" else -1)) % size)
    assert all(map(_is_over, positions, actions)), "a rank waits for ever"
    return [RankTime(*times) for times in zip(ends, busy, strict=True)]


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


def _is_over(position: int, actions: Sequence[Action]) -> bool:
    return position == len(actions)
