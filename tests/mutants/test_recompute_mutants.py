"""Mistakes of recompute engines, most of them once shipped by some system, each put back: a named
test must fail.

Here: randomness, units of layers, split inputs, and what goes in and out of the Function. Regions:
test_region_mutants.py.
"""

from __future__ import annotations

import dataclasses
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch

from megatron_lite.model import attention, layer
from megatron_lite.parallel.rng import DEFAULT, TENSOR_PARALLEL, RngStreams
from megatron_lite.recompute import checkpoint as engine
from megatron_lite.recompute import layer_runner as runner
from megatron_lite.recompute import phase, randomness
from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.recompute.recompute_plan import RecomputePlan
from tests.recompute import (
    test_checkpoint,
    test_equality,
    test_randomness,
    test_runner,
    test_schedule,
    test_split,
)
from tests.support.changes import with_fields
from tests.support.mutants import Mutant, assert_seen, replaces

Patch, Function, Randomness = pytest.MonkeyPatch, engine._Checkpoint, randomness.Randomness


@replaces("_restore", Randomness)
def nothing_is_restored(_, self):
    pass


@replaces("replayed", Randomness)
@contextmanager
def the_replay_advances_the_kept_states(replayed, self):
    """The caller's dict of states is put into the tracker, not copies."""
    with replayed(self):
        yield
        for state, now in zip(self.states, Randomness.now(self.streams).states, strict=True):
            state.data.copy_(now)


@replaces("_restore", Randomness)
def the_replay_starts_in_the_default_stream(restore, self):
    return restore(dataclasses.replace(self, names=with_fields(self.names, current=DEFAULT)))


@replaces("now", Randomness)
def the_cpu_generator_is_forgotten(now, streams):
    randomness = now(streams)
    return dataclasses.replace(randomness, states=randomness.states[: len(randomness.names.names)])


@replaces("replayed", Randomness)
@contextmanager
def the_streams_stay_where_the_replay_left_them(_, self):
    self._restore()
    yield


@replaces("drawn_from", RngStreams)
def a_redrawn_mask_comes_from_the_numbers_that_are_next(_, self, state):
    return nullcontext()


@replaces("add_dropped_out", layer)
def residual_masks_of_a_replay_come_from_the_other_stream(
    real, residual, branch, probability, regions, stream, **facts
):
    if is_recomputing():
        stream = DEFAULT if stream == TENSOR_PARALLEL else TENSOR_PARALLEL
    return real(residual, branch, probability, regions, stream, **facts)


@replaces("dropout", attention)
def attention_masks_of_a_replay_are_shared_by_ranks(real, weights, dropped, rng, stream, *others):
    stream = DEFAULT if is_recomputing() else stream
    return real(weights, dropped, rng, stream, *others)


@replaces("_chain", runner)
def every_layer_of_a_unit_gets_the_units_input(chain, plan, segment, part, rng, **facts):
    return chain(plan, segment, part[-1:], rng, **facts)


@replaces("plan_stage", test_schedule)
def the_last_shorter_unit_is_left_out(plan_stage, *args):
    plan = plan_stage(*args)
    return RecomputePlan(
        tuple(unit for unit in plan.segments if unit.num_layers == plan.segments[0].num_layers)
    )


@replaces("_whole_input", engine)
def parts_are_gathered_in_the_wrong_order(whole_input, ctx, shard):
    return whole_input(ctx, shard).roll(1, 0)


@replaces("_whole_input", engine)
def the_gather_ahead_is_of_this_units_part(whole_input, ctx, shard):
    mine = (
        engine.start_all_gather_first_dim(shard, ctx.call.split_group)
        if ctx.gather is None
        else ctx.gather
    )
    ctx.gather = mine
    whole = whole_input(ctx, shard)
    if ctx.call.previous is not None:
        ctx.call.previous.gather.wait()
        ctx.call.previous.gather = mine
    return whole


def the_callers_tensor_becomes_its_part(patch: Patch) -> None:
    """In evaluation too, which never undoes it."""

    @replaces("split_for_rank", engine)
    def overwriting(split, tensor, group):
        tensor.data = split(tensor, group)
        return tensor.data

    @replaces("checkpoint", test_split)
    def ungated(gated, function, hidden, *, split_group, **facts):
        output = gated(function, hidden, split_group=split_group, **facts)
        if not torch.is_grad_enabled():
            engine.split_for_rank(hidden, split_group)
        return output

    for part in (overwriting, ungated):
        part(patch)


@replaces("autocast_states", engine)
def autocast_is_forgotten(_, kinds):
    return []


@replaces("apply", Function)
def there_is_no_anchor(apply, call, anchor, *values):
    return apply(call, anchor.detach(), *values)


@replaces("_not_a_parameter", engine)
def parameters_are_returned_as_they_are(_, value):
    return value


class _Switch(threading.local):
    """A phase that is on or off, whatever is added to its depth."""

    is_on = False

    @property
    def depth(self) -> int:
        return int(self.is_on)

    @depth.setter
    def depth(self, depth: int) -> None:
        self.is_on = depth > 0


@replaces("_phase", phase)
def the_phase_is_a_switch(_):
    return _Switch()


@replaces("recomputing", engine)
def a_replay_does_not_say_that_it_is_one(_):
    return nullcontext()


@replaces("forward", Function)
def inputs_are_kept_on_the_context(forward, ctx, call, anchor, *values):
    ctx.inputs = values
    return forward(ctx, call, anchor, *values)


SAME_NUMBERS = test_checkpoint.test_every_backward_sees_the_numbers_of_the_forward
STREAMS_UNMOVED = test_randomness.test_backward_leaves_the_streams_as_it_found_them
MASKS = test_randomness.test_a_replay_draws_the_masks_of_its_forward_on_the_right_stream
UNITS = dict(
    recompute=test_randomness.UNITS_OF_TWO,
    residual_order=[5, 6, 1, 2, 3, 4],
    attention_order=[2, 0, 1],
)
CORE = dict(recompute=test_randomness.CORE_ATTENTION, residual_order=[], attention_order=[2, 1, 0])
POINTWISE = dict(
    recompute=test_randomness.POINTWISE, residual_order=[6, 5, 4, 3, 2, 1], attention_order=[]
)
LEFT_ALONE = test_split.test_the_callers_tensor_is_left_alone
SPLIT = test_split.test_whole_inputs_are_freed_and_gathered_once_a_unit_one_ahead_of_the_replay
EQUAL = test_equality.check
IN_FLOAT32 = dict(sequence_parallel=False, precision=torch.float32)
GPT = "gpt, unfused, dropout"


def gpt_with(policy: str) -> dict[str, object]:
    return dict(IN_FLOAT32, tp_size=2 if "split" in policy else 1, chosen={GPT: [policy]})


MUTANTS = [
    # A replay restores every stream, the current one's name and the CPU's generator, as copies, and
    # leaves no trace.
    Mutant(nothing_is_restored, SAME_NUMBERS, dict(times=1)),
    Mutant(the_replay_advances_the_kept_states, SAME_NUMBERS, dict(times=2)),
    Mutant(
        the_replay_starts_in_the_default_stream,
        test_checkpoint.test_a_unit_inside_an_open_fork_replays_in_that_stream,
        dict(current=TENSOR_PARALLEL),
    ),
    Mutant(
        the_cpu_generator_is_forgotten,
        test_checkpoint.test_a_replay_repeats_the_cpu_generator_beside_the_streams_of_a_device,
        dict(times=1),
    ),
    Mutant(
        the_streams_stay_where_the_replay_left_them,
        test_checkpoint.test_backward_leaves_the_streams_as_it_found_them,
    ),
    Mutant(
        the_streams_stay_where_the_replay_left_them,
        STREAMS_UNMOVED,
        dict(recompute=test_randomness.UNITS_OF_TWO),
    ),
    Mutant(nothing_is_restored, EQUAL, gpt_with("uniform 1")),
    Mutant(nothing_is_restored, EQUAL, gpt_with("core_attn")),
    # Residual masks are the TP ranks' own under sequence parallelism and shared without it,
    # attention masks always their own.
    Mutant(
        residual_masks_of_a_replay_come_from_the_other_stream,
        MASKS,
        dict(UNITS, sequence_parallel=False),
    ),
    Mutant(
        residual_masks_of_a_replay_come_from_the_other_stream,
        MASKS,
        dict(UNITS, sequence_parallel=True),
    ),
    Mutant(
        attention_masks_of_a_replay_are_shared_by_ranks, MASKS, dict(CORE, sequence_parallel=False)
    ),
    Mutant(
        a_redrawn_mask_comes_from_the_numbers_that_are_next,
        MASKS,
        dict(POINTWISE, sequence_parallel=True),
    ),
    # Units.
    Mutant(
        every_layer_of_a_unit_gets_the_units_input,
        test_runner.test_in_a_replay_too_every_layer_of_a_unit_gets_what_the_one_before_returned,
    ),
    Mutant(every_layer_of_a_unit_gets_the_units_input, EQUAL, gpt_with("uniform 2")),
    Mutant(
        the_last_shorter_unit_is_left_out,
        test_schedule.test_the_plan_of_five_layers,
        dict(
            flags=dict(
                recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2
            ),
            segments=[test_schedule.unit(0, 2), test_schedule.unit(2, 2), test_schedule.unit(4)],
        ),
    ),
    # Split inputs.
    Mutant(the_callers_tensor_becomes_its_part, LEFT_ALONE, dict(grad=True), "size of tensor a"),
    Mutant(the_callers_tensor_becomes_its_part, LEFT_ALONE, dict(grad=False)),
    Mutant(parts_are_gathered_in_the_wrong_order, SPLIT),
    Mutant(parts_are_gathered_in_the_wrong_order, EQUAL, gpt_with("uniform 2 split")),
    Mutant(the_gather_ahead_is_of_this_units_part, SPLIT),
    # In and out of the Function.
    Mutant(autocast_is_forgotten, test_checkpoint.test_a_replay_sees_the_autocast_of_its_forward),
    Mutant(
        autocast_is_forgotten,
        test_checkpoint.test_a_replay_is_not_under_the_autocast_of_its_backward,
    ),
    Mutant(
        there_is_no_anchor,
        test_checkpoint.test_parameters_inside_get_their_gradients_though_no_input_needs_one,
        error="does not require grad",
    ),
    Mutant(
        there_is_no_anchor,
        test_runner.test_frozen_weights_get_no_gradient_and_the_others_the_same,
        dict(frozen="embeddings", recompute=test_runner.UNITS_OF_TWO),
    ),
    Mutant(parameters_are_returned_as_they_are, test_checkpoint.test_a_parameter_may_be_returned),
    Mutant(the_phase_is_a_switch, test_checkpoint.test_the_phase_nests_and_belongs_to_its_thread),
    Mutant(
        inputs_are_kept_on_the_context,
        test_checkpoint.test_what_is_kept_can_be_moved_away_and_brought_back,
    ),
    Mutant(
        inputs_are_kept_on_the_context,
        test_runner.test_a_unit_or_region_holds_no_tensor_but_those_saved_for_backward,
        dict(recompute=test_runner.UNITS_OF_TWO),
    ),
    Mutant(inputs_are_kept_on_the_context, SPLIT),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: Patch) -> None:
    assert_seen(mutant, monkeypatch)
