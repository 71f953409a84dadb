"""The best mix of actions for a stage: against every assignment of actions to layers."""

import itertools
import random

import pytest

from megatron_lite.plan.policies import LayerChoice, best_mix, least_seconds
from tests.support.pairs import in_one_test


@in_one_test("seed", range(300))
def test_no_assignment_to_layers_is_faster_than_the_mix(seed):
    rng = random.Random(seed)
    choices = tuple(
        LayerChoice(
            rng.randint(0, 20),
            rng.choice([0, rng.randint(0, 30)]),
            rng.choice([0.0, 5.0 * rng.random(), float(rng.randint(0, 4))]),
        )
        for _ in range(rng.randint(1, 4))
    )
    in_flight, limit, num_layers = rng.randint(1, 4), rng.randint(0, 200), rng.randint(1, 5)
    found = []
    for assigned in itertools.product(choices, repeat=num_layers):
        kept = fullest = 0
        for choice in assigned:
            kept += choice.kept
            fullest = max(fullest, kept + choice.rebuilt)
        if (in_flight - 1) * kept + fullest <= limit:
            found.append(sum(choice.seconds for choice in assigned))
    mix = best_mix(choices, num_layers, in_flight, limit)
    bound = least_seconds(choices, num_layers, in_flight, limit)
    if mix is None:
        assert not found
        return
    assert sum(number for _, number in mix.rows) == num_layers
    assert all(number > 0 for _, number in mix.rows) and mix.peak(in_flight) <= limit
    assert mix.seconds == sum(number * one.seconds for one, number in mix.rows)
    assert mix.seconds == pytest.approx(min(found), abs=1e-9)
    assert bound is not None and bound.seconds <= mix.seconds + 1e-9
