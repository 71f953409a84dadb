"""The schedules of every small pipeline, run in a simulator that knows only what a stage needs
before it can start."""

import itertools
from fractions import Fraction

import pytest

from megatron_lite.pipeline.order import Action, StepOrder, most_in_flight

LAYOUTS = [
    (size, num_chunks, microbatches)
    for size, num_chunks, microbatches in itertools.product(range(1, 9), range(1, 5), range(1, 17))
    if num_chunks == 1 or (size > 1 and microbatches % size == 0)
]


def orders(size, num_chunks, microbatches):
    return [StepOrder(size, rank, microbatches, num_chunks).actions() for rank in range(size)]


def simulate(actions, num_chunks):
    """Runs every rank's list in its order, each action as soon as what it needs was made:
    (duration, [(end, rank, action)]).

    A forward of one whole rank takes 1 and a backward 2, divided over its stages. AssertionError
    where all ranks wait.
    """
    size = len(actions)
    ends = {}  # (kind, micro-batch, stage)
    clocks, positions = [Fraction(0)] * size, [0] * size
    trace = []
    while any(position < len(own) for position, own in zip(positions, actions, strict=True)):
        moved = False
        for rank in range(size):
            if positions[rank] == len(actions[rank]):
                continue
            action = actions[rank][positions[rank]]
            stage = action.chunk * size + rank
            last = size * num_chunks - 1
            if action.kind == "forward":
                needs = [("forward", action.microbatch, stage - 1)] if stage else []
            else:
                needs = [("forward", action.microbatch, stage)]
                needs += [("backward", action.microbatch, stage + 1)] if stage < last else []
            if not all(need in ends for need in needs):
                continue
            start = max([clocks[rank], *(ends[need] for need in needs)])
            clocks[rank] = start + Fraction(1 if action.kind == "forward" else 2, num_chunks)
            ends[action.kind, action.microbatch, stage] = clocks[rank]
            trace.append((clocks[rank], rank, action))
            positions[rank] += 1
            moved = True
        assert moved, (
            "all ranks wait: "
            f"{[own[position:][:1] for position, own in zip(positions, actions, strict=True)]}"
        )
    return max(clocks), trace


@pytest.mark.parametrize("num_chunks", range(1, 5))
def test_every_micro_batch_passes_every_stage_once_and_nobody_waits_for_ever(num_chunks):
    for size, _, microbatches in [layout for layout in LAYOUTS if layout[1] == num_chunks]:
        actions = orders(size, num_chunks, microbatches)
        everything = {
            Action(kind, microbatch, chunk)
            for kind in ("forward", "backward")
            for microbatch in range(microbatches)
            for chunk in range(num_chunks)
        }
        assert all(len(own) == len(everything) and set(own) == everything for own in actions)
        duration, _ = simulate(actions, num_chunks)
        # section 2.2 of 2104.04473
        assert duration == 3 * microbatches * (1 + Fraction(size - 1, num_chunks * microbatches))


@pytest.mark.parametrize("num_chunks", range(1, 5))
def test_as_many_are_in_flight_as_the_formula_says(num_chunks):
    for size, _, microbatches in [layout for layout in LAYOUTS if layout[1] == num_chunks]:
        for rank, own in enumerate(orders(size, num_chunks, microbatches)):
            counts = [*itertools.accumulate(1 if one.kind == "forward" else -1 for one in own)]
            expected = most_in_flight(**StepOrder(size, rank, microbatches, num_chunks)._asdict())
            assert max(counts) == expected and counts[-1] == 0
            # the paper's figure for 1F1B
            assert num_chunks > 1 or expected == min(size - rank, microbatches)


def test_neighbours_send_in_the_order_in_which_they_receive():
    """Tensors carry no name on their way: who sends and who receives must count alike."""
    for size, num_chunks, microbatches in LAYOUTS:
        actions = orders(size, num_chunks, microbatches)
        for rank in range(size if size > 1 else 0):
            peer = (rank + 1) % size
            # from the last rank to the first: the next of its stages
            step = 1 if rank == size - 1 else 0
            for kind, sender, receiver in (("forward", rank, peer), ("backward", peer, rank)):
                offset = step if kind == "forward" else -step
                sent = [
                    (one.microbatch, one.chunk + offset)
                    for one in actions[sender]
                    if one.kind == kind
                    and 0 <= one.chunk + offset < num_chunks
                    and not (kind == "forward" and step and one.chunk == num_chunks - 1)
                ]
                received = [
                    (one.microbatch, one.chunk)
                    for one in actions[receiver]
                    if one.kind == kind and 0 <= one.chunk - offset < num_chunks
                ]
                assert sent == received


@pytest.mark.parametrize(
    "rank, kept", [(0, [0, 4]), (1, [0, 3, 6]), (2, [0, 2, 4, 6]), (3, [0, 1, 2, 3, 4, 5, 6, 7])]
)
def test_of_each_window_the_first_micro_batches_keep_everything(rank, kept):
    """Windows are as long as micro-batches can be in flight, 4, 3, 2 and 1: of all that wait at
    once, one keeps everything."""
    order = StepOrder(4, rank, 8)
    assert sorted(action.microbatch for action in order.keeping_all(1)) == kept
    kinds = [one.kind for one in order.actions() if one.microbatch in kept]
    assert kinds == ["forward", "backward"] * len(kept)
