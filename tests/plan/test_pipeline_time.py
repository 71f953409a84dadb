"""The simulated pipeline against the formula of 2104.04473 and an independent simulator."""

import random

import pytest

from megatron_lite.plan.pipeline_time import (
    Durations,
    run_pipeline,
    shortest_pipeline,
    simulate_pipeline,
)
from tests.pipeline.test_order import LAYOUTS, orders, simulate


@pytest.mark.parametrize("num_chunks", range(1, 5))
def test_every_layout_takes_as_long_as_in_the_other_simulator(num_chunks):
    for size, _, microbatches in [one for one in LAYOUTS if one[1] == num_chunks]:
        duration, _ = simulate(orders(size, num_chunks, microbatches), num_chunks)
        passes = [[(1 / num_chunks, 2 / num_chunks)] * num_chunks] * size
        assert max(run_pipeline(Durations(passes), microbatches)) == pytest.approx(float(duration))


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_transfers_delay_and_without_overlap_they_delay_more(num_chunks):
    def end(transfer, overlap):
        return max(run_pipeline(Durations([[(1.0, 2.0)] * num_chunks] * 4, transfer, overlap), 16))

    assert end(0.0, True) == end(0.0, False)
    assert end(0.0, True) < end(0.1, True) < end(0.1, False)
    # Every action of a middle rank receives its input first, and computes 1 or 2.
    assert end(0.1, False) >= 16 * num_chunks * (3.0 + 2 * 0.1)


@pytest.mark.parametrize("seed", range(40))
def test_two_short_runs_have_the_times_of_the_whole_and_a_lower_bound(seed):
    rng = random.Random(seed)
    size, num_chunks = rng.randint(2, 5), rng.choice([1, 1, 2, 3])
    pairs = [
        tuple(rng.choice([1.0, 1.0 + rng.random()]) for _ in range(2))
        for _ in range(size * num_chunks)
    ]
    passes = [pairs[rank::size] for rank in range(size)]
    transfer, overlap = rng.choice([0.0, 0.3 * rng.random()]), rng.random() < 0.7
    durations = Durations(passes, transfer, overlap)
    number = size * rng.randint(8, 30)
    whole, bound = (simulate_pipeline(durations, number), shortest_pipeline(durations, number))
    for one, other, low in zip(run_pipeline(durations, number), whole, bound, strict=True):
        assert one == pytest.approx(other, rel=1e-2)
        assert low <= other * (1 + 1e-12)
