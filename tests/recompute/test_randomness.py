"""The masks that a backward draws again in a model: those of its forward, shared by the TP ranks or
each rank's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lite.config.recompute import RecomputeConfig
from tests.support.dropout_masks import Masks, mask_faults, recorded_masks
from tests.support.models import sample_tokens, tp_state
from tests.support.planned import NUM_LAYERS, planned
from tests.support.ranks import run_ranks

UNITS_OF_TWO = RecomputeConfig(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2
)
CORE_ATTENTION = RecomputeConfig(recompute_activations=True)
POINTWISE = RecomputeConfig(recompute_granularity="selective", recompute_modules=("pointwise",))


def masks_of_a_step(
    rank: int, world_size: int, sequence_parallel: bool, recompute: RecomputeConfig
) -> Masks:
    """All that forward and backward draw on this rank."""
    with tp_state(world_size) as parallel:
        model = planned(
            recompute,
            parallel=parallel,
            variant="gpt2",
            sequence_parallel=sequence_parallel,
            hidden_dropout=0.5,
            attention_dropout=0.5,
            attention_backend="unfused",
        )
        with recorded_masks() as masks:
            model.loss(*sample_tokens()).mean().backward()
    return masks


def same(drawn: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(drawn, expected, strict=True))


@pytest.mark.runs(daily=2, ci=6)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("recompute", "residual_order", "attention_order"),
    [
        # mask 0 is the embedding's, then two a layer; the last unit is first
        (UNITS_OF_TWO, [5, 6, 1, 2, 3, 4], [2, 0, 1]),
        (CORE_ATTENTION, [], [2, 1, 0]),
        (POINTWISE, [6, 5, 4, 3, 2, 1], []),  # masks redrawn from a stream's state
    ],
    ids=["units of two", "core_attn", "pointwise"],
)
def test_a_replay_draws_the_masks_of_its_forward_on_the_right_stream(
    sequence_parallel: bool,
    recompute: RecomputeConfig,
    residual_order: list[int],
    attention_order: list[int],
) -> None:
    ranks = run_ranks(masks_of_a_step, 2, sequence_parallel, recompute, detail=False)
    for masks in ranks:
        forward = masks.residual[: 1 + 2 * NUM_LAYERS]
        assert same(masks.residual[len(forward) :], [forward[number] for number in residual_order])
        assert same(
            masks.attention[NUM_LAYERS:], [masks.attention[number] for number in attention_order]
        )
    assert mask_faults(*ranks, sequence_parallel=sequence_parallel) == set()


@pytest.mark.parametrize(
    "recompute",
    [UNITS_OF_TWO, CORE_ATTENTION, POINTWISE],
    ids=["units of two", "core_attn", "pointwise"],
)
def test_backward_leaves_the_streams_as_it_found_them(recompute: RecomputeConfig) -> None:
    with tp_state(1) as parallel:
        model = planned(
            recompute, parallel=parallel, variant="gpt2", hidden_dropout=0.5, attention_dropout=0.5
        )
        loss = model.loss(*sample_tokens()).mean()
        model.loss(*sample_tokens(5))  # what is drawn again ends elsewhere
        before = parallel.rng.snapshot()
        loss.backward()
        after = parallel.rng.snapshot()
    assert after.current == before.current
    assert all(torch.equal(after.states[name], state) for name, state in before.states.items())
