"""A sharded model computes what the unsharded one computes: the loss, every gradient, every weight
after training.

Errors are relative to the largest value of their tensor (support/equality.py). What each tolerance
allows for:
    float64 1e-13   sums of a few hundred terms taken in another order, at 2e-16 each; a fault of
                    logic is above 1e-3
    float32 1e-5    the same at 1e-7 each
"""

from __future__ import annotations

import pytest
import torch

from tests.support.equality import (
    VARIANTS,
    Training,
    difference,
    differences,
    gradients,
    train,
    unsharded_gradients,
)
from tests.support.models import Outcome, tp_state
from tests.support.pairs import FULL_GRIDS
from tests.support.ranks import run_ranks

TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5}
PRECISIONS = pytest.mark.parametrize("dtype", TOLERANCES, ids=["float64", "float32"])


@pytest.fixture(scope="module")
def unsharded() -> dict[tuple[str, torch.dtype], Outcome]:
    return {
        (name, dtype): unsharded_gradients(name, dtype) for name in VARIANTS for dtype in TOLERANCES
    }


@pytest.fixture(
    scope="module",
    params=[
        (2, False),
        (2, True),
        *(pytest.param((4, split), marks=pytest.mark.long) for split in (False, True)),
    ],
    ids=["tp2", "tp2-sequence-parallel", "tp4", "tp4-sequence-parallel"],
)
def sharded(request: pytest.FixtureRequest) -> list[dict[tuple[str, torch.dtype], Outcome]]:
    """Every variant's outcome, as each rank of one TP group sees it."""
    tp_size, sequence_parallel = request.param

    def work(rank: int, world_size: int) -> dict[tuple[str, torch.dtype], Outcome]:
        with tp_state(tp_size) as parallel:
            return {
                (name, dtype): gradients(
                    name, parallel, sequence_parallel=sequence_parallel, dtype=dtype
                )
                for name in VARIANTS
                for dtype in TOLERANCES
            }

    # The collectives of four ranks are those of two.
    return run_ranks(work, tp_size, detail=None if tp_size == 2 else False)


@PRECISIONS
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_every_gradient_equal_the_unsharded_models(name, dtype, sharded, unsharded):
    for of_rank in sharded:
        errors = differences(unsharded[name, dtype], of_rank[name, dtype])
        assert {key: error for key, error in errors.items() if not error < TOLERANCES[dtype]} == {}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_rank_has_the_same_loss_and_gradients_to_the_bit(name, sharded):
    first, *others = [of_rank[name, torch.float32] for of_rank in sharded]
    for other in others:
        assert torch.equal(first.loss, other.loss)
        assert all(torch.equal(grad, other.grads[key]) for key, grad in first.grads.items())


def test_no_gradient_is_all_zeros(unsharded):
    """Else a parameter that a test compares says nothing."""
    for outcome in unsharded.values():
        assert [key for key, grad in outcome.grads.items() if not grad.any()] == []


TRAININGS = {  # world size, TP size, sequence parallel, variants, steps
    "tp2": (2, 2, False, tuple(VARIANTS) if FULL_GRIDS else ("gpt2", "nemotron"), 20),
    "tp2-sequence-parallel": (2, 2, True, ("qwen",), 20),
    "tp4-sequence-parallel": (4, 4, True, ("llama",), 6),
    "dp2": (2, 1, False, ("gpt2",), 4),
    "tp2-dp2": (4, 2, False, ("neox",), 4),
    "tp2-dp2-sequence-parallel": (4, 2, True, ("gpt2",), 4),
}


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            layout, marks=[pytest.mark.long] * (layout in ("tp2-sequence-parallel", "tp2-dp2"))
        )
        for layout in TRAININGS
    ],
)
def test_losses_norms_and_weights_equal_the_unsharded_models_during_training(layout):
    """The same global batch on every layout. 20 AdamW steps amplify rounding; the global norm, and
    with it the clipping, is a float32 number (6e-8) at any dtype: hence 1e-6."""
    world_size, tp_size, sequence_parallel, names, steps = TRAININGS[layout]

    def work(rank: int, world_size: int) -> list[Training]:
        with tp_state(tp_size) as parallel:
            return [
                train(name, parallel, steps=steps, sequence_parallel=sequence_parallel)
                for name in names
            ]

    with tp_state(1) as parallel:
        expected = [train(name, parallel, steps=steps) for name in names]
    for of_rank in run_ranks(work, world_size, detail=False):
        for want, have in zip(expected, of_rank, strict=True):
            assert want.losses[-1] < want.losses[0] - 0.5  # it trains
            assert have.losses == pytest.approx(want.losses, rel=1e-6)
            assert have.grad_norms == pytest.approx(want.grad_norms, rel=1e-6)
            assert {
                key
                for key, value in want.weights.items()
                if difference(value, have.weights[key]) > 1e-6
            } == set()
