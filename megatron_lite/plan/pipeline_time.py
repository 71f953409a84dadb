"""The time of a step's micro-batches through the pipeline, by running every rank's list of actions.

Each rank runs its actions in the order of pipeline/order.py, each as soon as the rank is free and
the action's input has arrived. With equal stages, and transfers that take no time, a step takes
(m + (p - 1) / v) (F + B) (2104.04473, section 2.2); the lists give the time of any other step.
Standard library only.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.pipeline.order import order

WARM_UP = 3  # times the micro-batches that are in flight, until the schedule repeats
AVERAGED = 4  # periods


class Durations(NamedTuple):
    """The time of one micro-batch.

    forward, backward: the seconds by rank and by chunk, the number of the rank's virtual stage.
    transfer: the seconds that hidden states need from one rank to the next.
    overlap: whether a rank receives its next input while it computes.
    """

    forward: Sequence[Sequence[float]]
    backward: Sequence[Sequence[float]]
    transfer: float = 0.0
    overlap: bool = True


def run_pipeline(durations: Durations, num_microbatches: int) -> list[float]:
    """Returns when each rank ends its last action.

    The schedule soon repeats: each further period of p micro-batches (1 without virtual stages)
    takes as long as the one before it, on every rank. So the time of many periods follows from two
    short runs, of which one has AVERAGED periods more. Stages that take very different times repeat
    later; the result is then within 1 %.
    """
    size = len(durations.forward)
    period = size if len(durations.forward[0]) > 1 else 1
    few = WARM_UP * -(-(2 * size + 2) // period) * period + num_microbatches % period
    more = (num_microbatches - few) / (AVERAGED * period)
    if more < 1:
        return simulate_pipeline(durations, num_microbatches)
    short, longer = (simulate_pipeline(durations, few + part * period) for part in (0, AVERAGED))
    return [end + more * (one - end) for end, one in zip(short, longer, strict=True)]


def shortest_pipeline(durations: Durations, num_microbatches: int) -> list[float]:
    """Returns lower bounds of these times, without a simulation.

    A rank begins when the first micro-batch arrives, and computes all of them. The gradient of the
    last one then passes through the ranks before it.
    """
    found = []
    arrives = passes = last = 0.0  # passes: through the backwards of all ranks before
    for forward, backward in zip(durations.forward, durations.backward, strict=True):
        found.append(arrives + num_microbatches * (sum(forward) + sum(backward)))
        last = max(last, found[-1] + passes)
        arrives += forward[0] + durations.transfer
        passes += backward[0] + durations.transfer
    return [last, *found[1:]]


def simulate_pipeline(durations: Durations, num_microbatches: int) -> list[float]:
    """Returns by rank when its last action ends, with all micro-batches simulated."""
    size, num_chunks = len(durations.forward), len(durations.forward[0])
    shape = dict(size=size, num_microbatches=num_microbatches, num_chunks=num_chunks)
    actions = [order(rank=rank, **shape) for rank in range(size)]
    ends: list[list[float]] = [[] for _ in range(size)]
    done: dict[tuple[str, int, int], float] = {}  # by kind, micro-batch and number of the stage
    # A rank runs until an input is missing. Whoever makes an input for another rank wakes it.
    awake = list(range(size))
    while awake:
        rank = awake.pop()
        own = ends[rank]
        while len(own) < len(actions[rank]):
            kind, microbatch, chunk = actions[rank][len(own)]
            stage, step = chunk * size + rank, 1 if kind == "forward" else -1
            start = own[-1] if own else 0.0
            if 0 <= stage - step < size * num_chunks:
                made = done.get((kind, microbatch, stage - step))
                if made is None:
                    break
                if durations.overlap:
                    start = max(start, made + durations.transfer)
                else:  # the rank begins to receive when it is free
                    start = max(start, made) + durations.transfer
            times = durations.forward if kind == "forward" else durations.backward
            own.append(start + times[rank][chunk])
            done[kind, microbatch, stage] = own[-1]
            awake.append((rank + step) % size)
    assert [*map(len, ends)] == [*map(len, actions)], "a rank waits for ever"
    return [own[-1] for own in ends]
