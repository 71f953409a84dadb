"""Terms of the time model that are left out or counted twice, each put back: a named test must
fail."""

from __future__ import annotations

import pytest

from megatron_lite.plan import operation_time, pipeline_time, stage_time
from megatron_lite.plan.hardware import Group, Hardware
from megatron_lite.plan.operation_time import Clock
from tests.plan import test_hardware, test_pipeline_time, test_step_time
from tests.support.changes import with_fields
from tests.support.mutants import Mutant, assert_seen, parameters, replaces

Patch = pytest.MonkeyPatch


@replaces("replayed_calls", stage_time)
def a_replay_runs_the_tail_too(replayed_calls, layers, segment, **_):
    return replayed_calls(layers, segment, skip_tail=False)


@replaces("weight_gradient", operation_time)
def backward_has_one_matmul_for_each_of_the_forward(_, matmul):
    return with_fields(matmul, m=1)


@replaces("exposed", Clock)
def collectives_of_backward_always_wait(_, self, seconds, beside):
    return seconds


@replaces("is_inside_a_node", Group)
def a_group_never_leaves_its_node(_, self, hardware):
    return True


@replaces("_fill", Hardware)
def rounds_of_tiles_are_always_full(_, self, m, n, batch):
    return 1.0


@replaces("_arrival", pipeline_time)
def an_input_arrives_at_once(arrival, *args):
    *others, durations, free = args
    return arrival(*others, with_fields(durations, transfer=0.0), free)


@replaces("activation_terms", stage_time)
def copies_to_the_host_are_free(_, model, plan, sizes):
    return ()


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
