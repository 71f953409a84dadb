"""Mistakes in a pipeline, each put back: a named test must fail."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.optim import optimizer as norms
from megatron_lite.parallel import state
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.pipeline import order
from megatron_lite.pipeline.order import Action
from tests.pipeline import test_order, test_pipeline
from tests.support.changes import with_fields
from tests.support.mutants import Mutant, assert_seen, parameters, replaces
from tests.support.pipelines import Layout

Patch = pytest.MonkeyPatch


@replaces("_embedding_group", state)
def each_end_keeps_its_own_gradient_of_a_tied_embedding(_, pipelines, pp_group):
    return None


@replaces("_counts_here", norms)
def the_norm_counts_a_tied_embedding_twice(_, spec, parallel):
    return parallel.tp_rank == 0 or spec.tp_dim is not None


@replaces("_sum_over_model", norms)
def the_norm_is_that_of_the_own_stages(_, value, parallel, shard_group):
    return all_reduce_(value, parallel.tp_group)


@replaces("_sequences", order)
def stages_go_backward_in_the_order_of_forward(
    sequences: Any, size: int, num_microbatches: int, num_chunks: int
) -> tuple[list[Action], list[Action]]:
    forwards, _ = sequences(size, num_microbatches, num_chunks)
    return forwards, [with_fields(action, kind="backward") for action in forwards]


TRAINS = test_pipeline.test_a_pipeline_trains_as_one_process_does
TIED = dict(layout=Layout(pp=2), variant="gpt2")


MUTANTS = [
    Mutant(each_end_keeps_its_own_gradient_of_a_tied_embedding, TRAINS, TIED),
    Mutant(the_norm_counts_a_tied_embedding_twice, TRAINS, TIED),
    Mutant(the_norm_is_that_of_the_own_stages, TRAINS, TIED),
    Mutant(
        stages_go_backward_in_the_order_of_forward,
        test_order.test_every_micro_batch_passes_every_stage_once_and_nobody_waits_for_ever,
        dict(num_chunks=2),
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_the_mistake_is_seen(mutant: Mutant, monkeypatch: Patch) -> None:
    assert_seen(mutant, monkeypatch)
