"""The simulated pipeline against the formula of 2104.04473 and an independent simulator."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from megatron_lite.plan.pipeline_time import Durations, run_pipeline, shortest_pipeline
from tests.pipeline.test_order import LAYOUTS, orders, simulate
from tests.support.changes import with_fields


def equal(forward: float, backward: float) -> Durations:
    """Returns the durations of equal stages."""
    return Durations(lambda _, action: forward if action.kind == "forward" else backward)


@pytest.mark.parametrize("num_chunks", range(1, 5))
def test_every_layout_takes_as_long_as_in_the_other_simulator(num_chunks: int) -> None:
    for size, _, microbatches in [one for one in LAYOUTS if one[1] == num_chunks]:
        duration, _ = simulate(orders(size, num_chunks, microbatches), num_chunks)
        ran = run_pipeline(
            Durations(
                lambda _, action: Fraction(1 if action.kind == "forward" else 2, num_chunks)  # type: ignore[arg-type]
            ),
            size=size,
            num_microbatches=microbatches,
            num_chunks=num_chunks,
        )
        assert max(one.end for one in ran) == pytest.approx(float(duration))


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_transfers_delay_and_without_overlap_they_delay_more(num_chunks: int) -> None:
    def end(transfer: float, overlap: bool) -> float:
        durations = with_fields(equal(1.0, 2.0), transfer=transfer, overlap=overlap)
        ran = run_pipeline(durations, size=4, num_microbatches=16, num_chunks=num_chunks)
        return max(one.end for one in ran)

    assert end(0.0, True) == end(0.0, False)
    assert end(0.0, True) < end(0.1, True) < end(0.1, False)
    # Every action of a middle rank receives its input first, and computes 1 or 2.
    assert end(0.1, False) >= 16 * num_chunks * (3.0 + 2 * 0.1)


def drawn(seed: int, *, alike: bool) -> tuple[Durations, dict[str, int]]:
    """Returns random durations of every stage, and a layout with many micro-batches."""
    rng = random.Random(seed)
    size, num_chunks = rng.randint(2, 5), rng.choice([1, 1, 2, 3])
    shape = dict(size=size, num_chunks=num_chunks, num_microbatches=size * rng.randint(8, 30))
    times = {
        (rank, chunk, kind): rng.choice([1.0, 1.0, 1.0 + rng.random()])
        for rank in range(size)
        for chunk in range(num_chunks)
        for kind in ("forward", "backward")
    }
    return (
        Durations(
            lambda rank, action: times[rank, action.chunk, action.kind],
            transfer=rng.choice([0.0, 0.3 * rng.random()]),
            overlap=rng.random() < 0.7,
            alike=alike,
        ),
        shape,
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_run_that_repeats_has_the_times_of_the_whole_and_a_lower_bound(seed: int) -> None:
    (quick, shape), (whole, _) = drawn(seed, alike=True), drawn(seed, alike=False)
    for one, other in zip(run_pipeline(quick, **shape), run_pipeline(whole, **shape), strict=True):
        assert one.end == pytest.approx(other.end, rel=1e-9)
        assert one.busy == pytest.approx(other.busy, rel=1e-9)

    for low, one in zip(
        shortest_pipeline(quick, **shape), run_pipeline(whole, **shape), strict=True
    ):
        assert low.end <= one.end * (1 + 1e-12) and low.busy == pytest.approx(one.busy)
