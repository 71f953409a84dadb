"""The best mix of actions for a stage: against every assignment of actions to layers."""

import itertools
import random

import pytest

from megatron_lite.plan.policies import Alike, LayerChoice, best_mix, least_seconds
from tests.support.pairs import in_one_test


def _choices(rng):
    return tuple(
        LayerChoice(
            rng.randint(0, 20),
            rng.choice([0, rng.randint(0, 30)]),
            rng.choice([0.0, 5.0 * rng.random(), float(rng.randint(0, 4))]),
        )
        for _ in range(rng.randint(1, 4))
    )


@in_one_test("seed", range(300))
def test_no_assignment_to_layers_is_faster_than_the_mix(seed):
    rng = random.Random(seed)
    runs = tuple(Alike(_choices(rng), rng.randint(1, 3)) for _ in range(rng.randint(0, 3)))
    in_flight, limit = rng.randint(1, 4), rng.randint(0, 200)
    found = []
    for assigned in itertools.product(*(one for one, count in runs for _ in range(count))):
        kept = fullest = 0
        for choice in assigned:
            kept += choice.kept
            fullest = max(fullest, kept + choice.rebuilt)
        if (in_flight - 1) * kept + fullest <= limit:
            found.append(sum(choice.seconds for choice in assigned))
    mix = best_mix(runs, in_flight, limit)
    bound = least_seconds(runs, in_flight, limit)
    if mix is None:
        assert not found
        return
    assert sum(number for _, number in mix.rows) == sum(run.length for run in runs)
    assert all(number > 0 for _, number in mix.rows) and mix.peak(in_flight) <= limit
    assert mix.seconds == sum(number * one.seconds for one, number in mix.rows)
    assert mix.seconds == pytest.approx(min(found), abs=1e-9)
    assert bound is not None and bound <= mix.seconds + 1e-9
