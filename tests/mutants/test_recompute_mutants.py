"""Mistakes of recompute engines, most of them once shipped by some system, each put back: a named
test must fail.

Here: randomness, units of layers, split inputs, and what goes in and out of the Function. Regions:
test_region_mutants.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import contextmanager, nullcontext

import pytest
import torch

from megatron_lite.model import attention, block
from megatron_lite.parallel.rng import DEFAULT, TENSOR_PARALLEL, RngStreams
from megatron_lite.recompute import checkpoint as engine
from megatron_lite.recompute import layer_runner as runner
from megatron_lite.recompute import phase, schedule
from megatron_lite.recompute import region_runner as regions
from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.recompute.plan import RecomputePlan
from megatron_lite.tensor_parallel.rank_context import RankContext
from tests.parallel import test_rng
from tests.recompute import (
    test_checkpoint,
    test_equality,
    test_randomness,
    test_runner,
    test_schedule,
    test_split,
)
from tests.support.mutants import Mutant, assert_seen

Patch, Function, Randomness = pytest.MonkeyPatch, engine._Checkpoint, engine.Randomness


def nothing_is_restored(patch: Patch) -> None:
    patch.setattr(Randomness, "_restore", lambda self: None)


def the_replay_advances_the_kept_states(patch: Patch) -> None:
    """The caller's dict of states is put into the tracker, not copies."""
    replayed = Randomness.replayed

    @contextmanager
    def sharing(self):
        with replayed(self):
            yield
            for state, now in zip(self.states, Randomness.now(self.streams).states, strict=True):
                state.data.copy_(now)

    patch.setattr(Randomness, "replayed", sharing)


def the_replay_starts_in_the_default_stream(patch: Patch) -> None:
    restore = Randomness._restore
    patch.setattr(
        Randomness,
        "_restore",
        lambda self: restore(dataclasses.replace(self, names=self.names._replace(current=DEFAULT))),
    )


def the_cpu_generator_is_forgotten(patch: Patch) -> None:
    now = Randomness.now

    def of_streams(streams):
        randomness = now(streams)
        return dataclasses.replace(
            randomness, states=randomness.states[: len(randomness.names.names)]
        )

    patch.setattr(Randomness, "now", of_streams)


def the_streams_stay_where_the_replay_left_them(patch: Patch) -> None:
    @contextmanager
    def replayed(self):
        self._restore()
        yield

    patch.setattr(Randomness, "replayed", replayed)


def a_fork_inside_a_fork_starts_from_the_stored_state(patch: Patch) -> None:
    @contextmanager
    def fork(self, name):
        outer = self._get()
        self._set(self._states[name])
        yield
        self._states[name] = self._get()
        self._set(outer)

    patch.setattr(RngStreams, "fork", fork)


def a_redrawn_mask_comes_from_the_numbers_that_are_next(patch: Patch) -> None:
    patch.setattr(RngStreams, "drawn_from", lambda self, state: nullcontext())


def redrawing_a_mask_moves_the_stream(patch: Patch) -> None:
    @contextmanager
    def drawn_from(self, state):
        self._set(state)
        yield

    patch.setattr(RngStreams, "drawn_from", drawn_from)


def residual_masks_of_a_replay_come_from_the_other_stream(patch: Patch) -> None:
    patch.setattr(
        RankContext,
        "residual_stream",
        property(
            lambda self: TENSOR_PARALLEL if self.sequence_parallel != is_recomputing() else DEFAULT
        ),
    )


def attention_masks_of_a_replay_are_shared_by_ranks(patch: Patch) -> None:
    real = attention.dropout
    patch.setattr(
        attention,
        "dropout",
        lambda weights, probability, rng, stream: real(
            weights, probability, rng, DEFAULT if is_recomputing() else stream
        ),
    )


def every_layer_of_a_unit_gets_the_units_input(patch: Patch) -> None:
    chain = runner._chain
    patch.setattr(
        runner,
        "_chain",
        lambda plan, segment, part, rng, **facts: chain(plan, segment, part[-1:], rng, **facts),
    )


def the_last_shorter_unit_is_left_out(patch: Patch) -> None:
    def whole_units(*args):
        plan = schedule.plan_stage(*args)
        return RecomputePlan(
            tuple(unit for unit in plan.segments if unit.num_layers == plan.segments[0].num_layers)
        )

    patch.setattr(test_schedule, "plan_stage", whole_units)


def layers_are_counted_over_all_forwards_of_the_process(patch: Patch) -> None:
    forwards, run_layers = itertools.count(), runner.run_layers

    def counting(plan: RecomputePlan, *args, **facts):
        start = next(forwards) % plan.num_layers
        moved = plan.segments[start:] + plan.segments[:start]
        plan = RecomputePlan(
            tuple(dataclasses.replace(part, first_layer=place) for place, part in enumerate(moved))
        )
        return run_layers(plan, *args, **facts)

    patch.setattr(block, "run_layers", counting)


def regions_capture_their_arguments(patch: Patch) -> None:
    patch.setattr(
        regions.Regions,
        "run",
        lambda self, name, function, first, *others, skip_tail=False: (
            regions.checkpoint(
                lambda tensor: function(tensor, *others, skip_tail), first, rng=self.rng
            )
            if name in self.rebuilt
            else function(first, *others, skip_tail)
        ),
    )


def parts_are_gathered_in_the_wrong_order(patch: Patch) -> None:
    whole_input = engine._whole_input
    patch.setattr(engine, "_whole_input", lambda ctx, shard: whole_input(ctx, shard).roll(1, 0))


def the_gather_ahead_is_of_this_units_part(patch: Patch) -> None:
    whole_input = engine._whole_input

    def confused(ctx, shard):
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

    patch.setattr(engine, "_whole_input", confused)


def nothing_is_gathered_ahead(patch: Patch) -> None:
    patch.setattr(
        engine,
        "_whole_input",
        lambda ctx, shard: (
            engine.start_all_gather_first_dim(shard, ctx.call.split_group).wait().view(ctx.shape)
        ),
    )


def the_callers_tensor_becomes_its_part(patch: Patch) -> None:
    """In evaluation too, which never undoes it."""
    split, gated = engine.split_for_rank, engine.checkpoint

    def overwriting(tensor, group):
        tensor.data = split(tensor, group)
        return tensor.data

    def ungated(function, hidden, *, split_group, **facts):
        output = gated(function, hidden, split_group=split_group, **facts)
        return output if torch.is_grad_enabled() else (overwriting(hidden, split_group), output)[1]

    patch.setattr(engine, "split_for_rank", overwriting)
    patch.setattr(test_split, "checkpoint", ungated)


def the_part_is_a_view_of_the_whole(patch: Patch) -> None:
    patch.setattr(
        engine,
        "split_for_rank",
        lambda tensor, group: tensor.detach().reshape(group.size(), -1)[group.rank()],
    )


def evaluation_goes_through_the_function_too(patch: Patch) -> None:
    patch.setattr(torch, "is_grad_enabled", lambda: True)


def autocast_is_forgotten(patch: Patch) -> None:
    patch.setattr(engine, "autocast_states", lambda kinds: [])


def there_is_no_anchor(patch: Patch) -> None:
    apply = Function.apply
    patch.setattr(
        Function, "apply", lambda call, anchor, *values: apply(call, anchor.detach(), *values)
    )


def parameters_are_returned_as_they_are(patch: Patch) -> None:
    patch.setattr(engine, "_not_a_parameter", lambda value: value)


def gradients_are_read_off_a_leaf(patch: Patch) -> None:
    def apply(received, places, *leaves):
        for place, leaf in zip(places, leaves, strict=True):
            leaf.register_post_accumulate_grad_hook(
                lambda full, place=place: received.__setitem__(place, full.grad)
            )
        return leaves

    patch.setattr(engine._Receive, "apply", apply)


def the_phase_is_a_switch(patch: Patch) -> None:
    @contextmanager
    def switched():
        phase._phase.depth = 1
        try:
            yield
        finally:
            phase._phase.depth = 0

    patch.setattr(engine, "recomputing", switched)
    patch.setattr(test_checkpoint, "recomputing", switched)


def an_exception_leaves_the_phase_on(patch: Patch) -> None:
    @contextmanager
    def without_finally():
        patch.setattr(phase._phase, "depth", 1, raising=False)
        yield
        phase._phase.depth = 0

    patch.setattr(engine, "recomputing", without_finally)


def a_replay_does_not_say_that_it_is_one(patch: Patch) -> None:
    patch.setattr(engine, "recomputing", nullcontext)


def inputs_are_kept_on_the_context(patch: Patch) -> None:
    forward = Function.forward

    def stashing(ctx, call, anchor, *values):
        ctx.inputs = values
        return forward(ctx, call, anchor, *values)

    patch.setattr(Function, "forward", staticmethod(stashing))


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
    Mutant(
        redrawing_a_mask_moves_the_stream,
        STREAMS_UNMOVED,
        dict(recompute=test_randomness.POINTWISE),
    ),
    Mutant(
        a_fork_inside_a_fork_starts_from_the_stored_state,
        test_rng.test_a_fork_inside_a_fork_of_the_same_name_goes_on_with_that_stream,
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
    Mutant(
        layers_are_counted_over_all_forwards_of_the_process,
        test_runner.test_which_layers_run_again_depends_on_their_place_in_the_stage_alone,
    ),
    Mutant(
        regions_capture_their_arguments,
        test_runner.test_a_unit_or_region_holds_no_tensor_but_those_saved_for_backward,
        dict(recompute=test_runner.REGIONS),
    ),
    # Split inputs.
    Mutant(the_callers_tensor_becomes_its_part, LEFT_ALONE, dict(grad=True), "size of tensor a"),
    Mutant(the_callers_tensor_becomes_its_part, LEFT_ALONE, dict(grad=False)),
    Mutant(parts_are_gathered_in_the_wrong_order, SPLIT),
    Mutant(parts_are_gathered_in_the_wrong_order, EQUAL, gpt_with("uniform 2 split")),
    Mutant(the_gather_ahead_is_of_this_units_part, SPLIT),
    Mutant(nothing_is_gathered_ahead, SPLIT),
    Mutant(the_part_is_a_view_of_the_whole, SPLIT),
    # In and out of the Function.
    Mutant(
        evaluation_goes_through_the_function_too,
        test_checkpoint.test_where_gradients_are_off_nothing_is_kept_and_the_result_is_direct,
    ),
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
    Mutant(
        gradients_are_read_off_a_leaf,
        test_checkpoint.test_a_gradient_is_handed_on_in_the_layout_that_backward_gave_it,
    ),
    Mutant(the_phase_is_a_switch, test_checkpoint.test_the_phase_nests_and_belongs_to_its_thread),
    Mutant(
        an_exception_leaves_the_phase_on,
        test_checkpoint.test_a_replay_knows_that_it_is_one_and_ends_by_an_exception_too,
    ),
    Mutant(
        a_replay_does_not_say_that_it_is_one,
        test_checkpoint.test_a_side_effect_happens_once_also_in_nested_units_and_with_two_backwards,
    ),
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
