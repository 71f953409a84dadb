"""Mistakes in a pipeline, each put back: a named test must fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from megatron_lite.optim import grad_norms as norms
from megatron_lite.parallel import state
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.pipeline import executor, order
from megatron_lite.pipeline.order import Action
from megatron_lite.training import build_trainer as build
from megatron_lite.training import micro_batches as runner
from tests.pipeline import test_memory, test_order, test_pipeline, test_runs
from tests.support.mutants import Mutant, assert_seen, parameters
from tests.support.pipelines import Layout

Patch = pytest.MonkeyPatch


def each_end_keeps_its_own_gradient_of_a_tied_embedding(patch: Patch) -> None:
    patch.setattr(state, "_embedding_group", lambda mesh, pp_group: None)


def the_norm_counts_a_tied_embedding_twice(patch: Patch) -> None:
    patch.setattr(
        norms,
        "_counts_here",
        lambda spec, parallel: parallel.tp_rank == 0 or spec.tp_dim is not None,
    )


def the_norm_is_that_of_the_own_stages(patch: Patch) -> None:
    patch.setattr(
        norms,
        "_sum_over_model",
        lambda value, parallel, shard_group: all_reduce_(value, parallel.tp_group),
    )


def an_output_lives_until_its_backward(patch: Patch) -> None:
    depart = executor.depart

    def holding(output: Tensor, fetch_grad: Callable[[], Tensor]) -> Tensor:
        end = depart(output, fetch_grad)
        end.output = output.detach()  # type: ignore[attr-defined]
        return end

    patch.setattr(executor, "depart", holding)


def a_received_input_lives_until_its_backward(patch: Patch) -> None:
    """Although 1/t of it is all that the first unit keeps."""
    arrive = executor.arrive

    def holding(received: Tensor, return_grad: Callable[[Tensor], None]) -> Tensor:
        return arrive(received, lambda grad: (received, return_grad(grad))[1])

    patch.setattr(executor, "arrive", holding)


def stages_go_backward_in_the_order_of_forward(patch: Patch) -> None:
    sequences = order._sequences

    def unreversed(
        size: int, num_microbatches: int, num_chunks: int
    ) -> tuple[list[Action], list[Action]]:
        forwards, _ = sequences(size, num_microbatches, num_chunks)
        return forwards, [action._replace(kind="backward") for action in forwards]

    patch.setattr(order, "_sequences", unreversed)


def every_rank_fills_the_pipeline_alike(patch: Patch) -> None:
    patch.setattr(order, "warmup_forwards", lambda *, size, rank, num_chunks=1: size - 1)


def the_window_is_the_whole_step(patch: Patch) -> None:
    patch.setattr(
        order,
        "most_in_flight",
        lambda *, size, rank, num_microbatches, num_chunks=1: num_microbatches * num_chunks,
    )


def the_step_has_no_windows(patch: Patch) -> None:
    """But memory is priced as if."""
    patch.setattr(runner, "keeping_all", lambda **_: frozenset())


def block_counts_the_layers_of_the_whole_model(patch: Patch) -> None:
    plan_stage = build.plan_stage
    patch.setattr(
        build,
        "plan_stage",
        lambda config, num_layers, stage=0: (
            plan_stage(config, num_layers) if stage == 0 else plan_stage(type(config)(), num_layers)
        ),
    )


HOLDS = test_memory.test_after_every_action_a_rank_holds_what_is_predicted
TRAINS = test_pipeline.test_a_pipeline_trains_as_one_process_does
TIED = dict(layout=Layout(pp=2), variant="gpt2")


def holds(case: int) -> dict[str, object]:
    return dict(zip(("ranks", "flags", "model"), test_memory.CASES[case], strict=True))


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
