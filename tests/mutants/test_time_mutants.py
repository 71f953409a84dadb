"""Terms of the time model that are left out or counted twice, each put back: a named test must
fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from megatron_lite.memory.predict.replays import ReplayedCall, replayed_calls
from megatron_lite.plan import operation_time, pipeline_time, stage_time
from megatron_lite.plan.hardware import Group, Hardware
from megatron_lite.plan.operation_time import Clock
from tests.plan import test_hardware, test_pipeline_time, test_step_time
from tests.support.changes import with_fields
from tests.support.mutants import Mutant, assert_seen, parameters

Patch = pytest.MonkeyPatch


def a_replay_runs_the_tail_too(patch: Patch) -> None:
    def all_calls(layers: Sequence[Any], segment: Any, **_: bool) -> Iterator[ReplayedCall]:
        return replayed_calls(layers, segment, skip_tail=False)

    patch.setattr(stage_time, "replayed_calls", all_calls)


def backward_has_one_matmul_for_each_of_the_forward(patch: Patch) -> None:
    patch.setattr(operation_time, "weight_gradient", lambda matmul: with_fields(matmul, m=1))


def collectives_of_backward_always_wait(patch: Patch) -> None:
    patch.setattr(Clock, "exposed", lambda self, seconds, beside: seconds)


def a_group_never_leaves_its_node(patch: Patch) -> None:
    patch.setattr(Group, "is_inside_a_node", lambda self, hardware: True)


def rounds_of_tiles_are_always_full(patch: Patch) -> None:
    patch.setattr(Hardware, "_fill", lambda self, m, n, batch: 1.0)


def an_input_arrives_at_once(patch: Patch) -> None:
    def without_transfer(*args: Any) -> float | None:
        *others, durations, free = args
        return arrival(*others, with_fields(durations, transfer=0.0), free)

    arrival = pipeline_time._arrival
    patch.setattr(pipeline_time, "_arrival", without_transfer)


def copies_to_the_host_are_free(patch: Patch) -> None:
    patch.setattr(stage_time, "activation_terms", lambda model, plan, sizes: ())


IDEAL = test_step_time.test_on_an_ideal_machine_a_step_takes_its_hardware_flops
ISSUED = test_step_time.test_collectives_that_nothing_hides_take_the_time_of_those_that_are_issued
FULL = dict(policy="*:full", tp=1, backend="unfused")
MUTANTS = [
    Mutant(a_replay_runs_the_tail_too, IDEAL, FULL),
    Mutant(backward_has_one_matmul_for_each_of_the_forward, IDEAL, FULL),
    Mutant(
        collectives_of_backward_always_wait, ISSUED, dict(policy="*:none", sequence_parallel=True)
    ),
    Mutant(
        a_group_never_leaves_its_node,
        test_step_time.test_tensor_parallel_ranks_on_several_nodes_are_slower_than_on_one,
    ),
    Mutant(
        rounds_of_tiles_are_always_full,
        test_hardware.test_one_tile_more_than_a_round_costs_a_second_round,
    ),
    Mutant(
        an_input_arrives_at_once,
        test_pipeline_time.test_transfers_delay_and_without_overlap_they_delay_more,
        dict(num_chunks=1),
    ),
    Mutant(
        copies_to_the_host_are_free,
        test_step_time.test_copies_to_the_host_are_hidden_where_the_bandwidth_is_high_enough,
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_a_fault_that_is_put_back_is_seen(mutant: Mutant, monkeypatch: Patch) -> None:
    assert_seen(mutant, monkeypatch)
