"""Mistakes in a pipeline, each put back: a named test must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from megatron_lite.optim import grad_norms as norms
from megatron_lite.parallel import state
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.pipeline import executor, order
from megatron_lite.pipeline.order import Action
from megatron_lite.training import build_trainer as build
from megatron_lite.training import step as runner
from tests.pipeline import test_memory, test_order, test_pipeline, test_runs
from tests.support.changes import with_fields
from tests.support.mutants import Mutant, assert_seen, parameters, replaces
from tests.support.pipelines import Layout

Patch = pytest.MonkeyPatch


@replaces("_embedding_group", state)
def each_end_keeps_its_own_gradient_of_a_tied_embedding(_, mesh, pp_group):
    return None


@replaces("_counts_here", norms)
def the_norm_counts_a_tied_embedding_twice(_, spec, parallel):
    return parallel.tp_rank == 0 or spec.tp_dim is not None


@replaces("_sum_over_model", norms)
def the_norm_is_that_of_the_own_stages(_, value, parallel, shard_group):
    return all_reduce_(value, parallel.tp_group)


@replaces("depart", executor)
def an_output_lives_until_its_backward(
    depart: Any, output: Tensor, fetch_grad: Callable[[], Tensor]
) -> Tensor:
    end = depart(output, fetch_grad)
    end.output = output.detach()  # type: ignore[attr-defined]
    return end


@replaces("arrive", executor)
def a_received_input_lives_until_its_backward(
    arrive: Any, received: Tensor, return_grad: Callable[[Tensor], None]
) -> Tensor:
    """Although 1/t of it is all that the first unit keeps."""
    return arrive(received, lambda grad: (received, return_grad(grad))[1])


@replaces("_sequences", order)
def stages_go_backward_in_the_order_of_forward(
    sequences: Any, size: int, num_microbatches: int, num_chunks: int
) -> tuple[list[Action], list[Action]]:
    forwards, _ = sequences(size, num_microbatches, num_chunks)
    return forwards, [with_fields(action, kind="backward") for action in forwards]


@replaces("warmup_forwards", order)
def every_rank_fills_the_pipeline_alike(_, *, size, rank, num_chunks=1):
    return size - 1


@replaces("most_in_flight", order)
def the_window_is_the_whole_step(_, *, size, rank, num_microbatches, num_chunks=1):
    return num_microbatches * num_chunks


@replaces("keeping_all", runner)
def the_step_has_no_windows(_, **facts):
    """But memory is priced as if."""
    return frozenset()


@replaces("plan_stage", build)
def block_counts_the_layers_of_the_whole_model(plan_stage, config, num_layers, stage=0):
    return plan_stage(config, num_layers) if stage == 0 else plan_stage(type(config)(), num_layers)


HOLDS = test_memory.test_after_every_action_a_rank_holds_what_is_predicted
TRAINS = test_pipeline.test_a_pipeline_trains_as_one_process_does
TIED = dict(layout=Layout(pp=2), variant="gpt2")


def holds(case: int) -> dict[str, object]:
    found = test_memory.CASES[case]
    values = getattr(found, "values", found)  # a case with marks is a pytest.param
    return dict(zip(("ranks", "flags", "model"), values, strict=True))


MUTANTS = [
    Mutant(each_end_keeps_its_own_gradient_of_a_tied_embedding, TRAINS, TIED),
    Mutant(the_norm_counts_a_tied_embedding_twice, TRAINS, TIED),
    Mutant(the_norm_is_that_of_the_own_stages, TRAINS, TIED),
    Mutant(an_output_lives_until_its_backward, HOLDS, holds(3)),
    Mutant(a_received_input_lives_until_its_backward, HOLDS, holds(5), long=True),
    Mutant(the_step_has_no_windows, HOLDS, holds(6), long=True),
    Mutant(
        stages_go_backward_in_the_order_of_forward,
        test_order.test_every_micro_batch_passes_every_stage_once_and_nobody_waits_for_ever,
        dict(num_chunks=2),
    ),
    Mutant(
        every_rank_fills_the_pipeline_alike,
        test_order.test_as_many_are_in_flight_as_the_formula_says,
        dict(num_chunks=1),
    ),
    Mutant(
        the_window_is_the_whole_step,
        test_order.test_of_each_window_the_first_micro_batches_keep_everything,
        dict(rank=0, kept=[0, 4]),
    ),
    Mutant(
        block_counts_the_layers_of_the_whole_model,
        test_runs.test_block_counts_the_layers_of_each_virtual_stage,
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_the_mistake_is_seen(mutant: Mutant, monkeypatch: Patch) -> None:
    monkeypatch.setattr(test_memory.Live, "patience_s", 1.0)  # what is wrong here stays so
    assert_seen(mutant, monkeypatch)
