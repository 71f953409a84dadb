"""The time of a step's micro-batches through the pipeline, by running every rank's list of actions.

Each rank runs its actions in the order of pipeline/order.py, each as soon as the rank is free and
the action's input has arrived. With equal stages, and transfers that take no time, a step takes
(m + (p - 1) / v) (F + B) (2104.04473, section 2.2); the lists give the time of any other step.
Standard library only.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.pipeline.order import StepOrder

WARM_UP = 3  # times the micro-batches that are in flight, until the schedule repeats
AVERAGED = 4  # periods


class Durations(NamedTuple):
    """The time of one micro-batch.

    passes: the seconds of its forward and of its backward, by rank and by chunk, the number of the
        rank's virtual stage.
    transfer: the seconds that hidden states need from one rank to the next.
    overlap: whether a rank receives its next input while it computes.
    """

    passes: Sequence[Sequence[tuple[float, float]]]
    transfer: float = 0.0
    overlap: bool = True


def run_pipeline(durations: Durations, num_microbatches: int) -> list[float]:
    """Returns when each rank ends its last action.

    The schedule soon repeats: each further period of p micro-batches (1 without virtual stages)
    takes as long as the one before it, on every rank. So the time of many periods follows from two
    short runs, of which one has AVERAGED periods more. Stages that take very different times repeat
    later; the result is then within 1 %.
    """
    size = len(durations.passes)
    period = size if len(durations.passes[0]) > 1 else 1
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
    for own in durations.passes:
        found.append(arrives + num_microbatches * sum(map(sum, own)))
        forward, backward = own[0]
        last = max(last, found[-1] + passes)
        arrives += forward + durations.transfer
        passes += backward + durations.transfer
    return [last, *found[1:]]


def simulate_pipeline(durations: Durations, num_microbatches: int) -> list[float]:
    """Returns by rank when its last action ends, with all micro-batches simulated."""
    size, num_chunks = len(durations.passes), len(durations.passes[0])
    orders = (StepOrder(size, rank, num_microbatches, num_chunks) for rank in range(size))
    waiting = [deque(one.actions()) for one in orders]
    ends = [0.0] * size
    made: dict[tuple[str, int, int], float] = {}  # by kind, micro-batch and number of the stage
    # A rank that receives nothing while it computes begins to receive when it is free.
    receives = 0.0 if durations.overlap else durations.transfer
    while any(waiting):
        before = len(made)
        for rank, actions in enumerate(waiting):
            while actions:  # a rank runs until an input is missing
                kind, microbatch, chunk = actions[0]
                stage, is_backward = chunk * size + rank, kind == "backward"
                source = stage + 1 if is_backward else stage - 1
                if 0 <= source < size * num_chunks:
                    arrives = made.get((kind, microbatch, source))
                    if arrives is None:
                        break
                    ends[rank] = max(ends[rank] + receives, arrives + durations.transfer)
                ends[rank] += durations.passes[rank][chunk][is_backward]
                made[kind, microbatch, stage] = ends[rank]
                actions.popleft()
        assert len(made) > before, "all ranks wait for ever"
    return ends
