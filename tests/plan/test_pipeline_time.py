"""The simulated pipeline against the formula of 2104.04473 and an independent simulator."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megatron_lite.pipeline.order import Action
from megatron_lite.plan.pipeline_time import Durations, run_pipeline
from tests.pipeline.test_order import LAYOUTS, orders, simulate


def equal(forward: float, backward: float) -> Durations:
    """Returns the durations of equal stages."""
    return Durations(lambda _, action: forward if action.kind == "forward" else backward)


@pytest.mark.parametrize("num_chunks", range(1, 5))
def test_equal_stages_take_the_time_of_the_formula(num_chunks: int) -> None:
    for size, _, microbatches in [
        one for one in LAYOUTS if one[1] == num_chunks and one[2] >= one[0]
    ]:
        ran = run_pipeline(
            equal(1.0 / num_chunks, 2.0 / num_chunks),
            size=size,
            num_microbatches=microbatches,
            num_chunks=num_chunks,
        )
        assert max(one.end for one in ran) == pytest.approx(
            3 * (microbatches + (size - 1) / num_chunks)
        )
        assert all(one.busy == pytest.approx(3 * microbatches) for one in ran)


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


def test_a_slow_stage_sets_the_pace() -> None:
    def duration(rank: int, action: Action) -> float:
        return 5.0 if rank == 1 else 1.0

    ran = run_pipeline(Durations(duration), size=3, num_microbatches=20)
    # The slow rank waits only for its first input.
    assert ran[1].end == pytest.approx(1.0 + 20 * 10.0)
    assert ran[0].end == ran[1].end + 1.0


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_transfers_delay_and_without_overlap_they_delay_more(num_chunks: int) -> None:
    def end(transfer: float, overlap: bool) -> float:
        durations = equal(1.0, 2.0)._replace(transfer=transfer, overlap=overlap)
        ran = run_pipeline(durations, size=4, num_microbatches=16, num_chunks=num_chunks)
        return max(one.end for one in ran)

    assert end(0.0, True) == end(0.0, False)
    assert end(0.0, True) < end(0.1, True) < end(0.1, False)
    # Every action of a middle rank receives its input first, and computes 1 or 2.
    assert end(0.1, False) >= 16 * num_chunks * (3.0 + 2 * 0.1)
