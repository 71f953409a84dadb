"""Known mistakes in recomputation, regions, kept results, offloading and replays of any model, each
put back: a named test must fail."""

from contextlib import contextmanager, nullcontext

import torch

from megatron_lite.model import layer
from megatron_lite.parallel import collectives
from megatron_lite.parallel.rng import DEFAULT, TENSOR_PARALLEL
from megatron_lite.recompute import call_arguments as arguments
from megatron_lite.recompute import checkpoint as engine
from megatron_lite.recompute import contents, layer_state, ops, replay, router, tiles, witness
from megatron_lite.recompute import layer_runner as runner
from megatron_lite.recompute.offload import Offload, _OnHost
from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.recompute.pool import Pool
from megatron_lite.recompute.randomness import Randomness
from megatron_lite.recompute.stores import Arena
from megatron_lite.tensor_parallel import layers as linear
from tests.recompute import (
    test_arena,
    test_checkpoint,
    test_discard,
    test_hooked_refusals,
    test_known_layers,
    test_offload,
    test_ops,
    test_router,
    test_runner,
    test_silent,
    test_split,
    test_tiles,
)
from tests.support.mutants import Mutant, each_is_seen, replaces

Function = engine._Checkpoint


@replaces("drawn_again", replay)
@contextmanager
def the_replay_advances_the_kept_states(drawn_again, states):
    """The caller's dict of states is put into the tracker, not copies."""
    with drawn_again(states):
        yield
        for each in states:
            for name, state in each.states.items():
                state.data.copy_(Randomness.of(each.generator).states[name])


@replaces("of", Randomness)
def the_cpu_generator_is_forgotten(now, streams):
    randomness = now(streams)
    own = {name: now(streams).states[name] for name in streams.snapshot().states}
    cpu = {name: torch.Generator().get_state() for name in randomness.states.keys() - own}
    return randomness._replace(states=own | cpu)


@replaces("add_dropped_out", layer)
def residual_masks_of_a_replay_come_from_the_other_stream(
    real, residual, branch, probability, regions, stream, **facts
):
    if is_recomputing():
        stream = DEFAULT if stream == TENSOR_PARALLEL else TENSOR_PARALLEL
    return real(residual, branch, probability, regions, stream, **facts)


@replaces("_whole_input", engine)
def parts_are_gathered_in_the_wrong_order(whole_input, ctx, shard):
    return whole_input(ctx, shard).roll(1, 0)


SAME_NUMBERS = test_checkpoint.test_every_backward_sees_the_numbers_of_the_forward
BETWEEN = test_runner.test_what_runs_between_forward_and_backward_changes_nothing
UNITS = dict(recompute=test_runner.UNITS_OF_TWO)
SPLIT = test_split.test_inputs_are_gathered_one_ahead_of_the_replay


MUTANTS = [
    # A replay restores every stream, the current one's name and the CPU's generator, as copies, and
    # leaves no trace.
    Mutant(the_replay_advances_the_kept_states, SAME_NUMBERS, dict(way="alone", times=2)),
    Mutant(
        the_cpu_generator_is_forgotten,
        test_checkpoint.test_a_replay_repeats_the_cpu_generator_beside_the_streams_of_a_device,
        dict(times=1),
    ),
    # Units, and the stream of their masks.
    Mutant(residual_masks_of_a_replay_come_from_the_other_stream, BETWEEN, UNITS),
    # Split inputs.
    Mutant(parts_are_gathered_in_the_wrong_order, SPLIT),
]


@replaces("discarding", test_discard)
@contextmanager
def nothing_is_discarded(_):
    yield lambda output: None


@replaces("_chain", runner)
def the_tail_of_every_layer_is_skipped(chain, plan, segment, part, *others, **facts):
    def run(hidden_states, *extras):
        for single in part:
            hidden_states = chain(plan, segment, [single], *others, **facts)(hidden_states, *extras)
        return hidden_states

    return run


@replaces("tiles_of", tiles)
def a_tile_begins_in_the_one_before(tiles_of, whole, number):
    return [slice(max(0, tile.start - 1), tile.stop) for tile in tiles_of(whole, number)]


SHARE_ONE = (
    test_discard.test_in_each_backward_all_consumers_share_one_rebuild_of_a_tensor_that_was_freed
)

MUTANTS += [
    Mutant(nothing_is_discarded, SHARE_ONE, dict(names=("linear",))),
    Mutant(the_tail_of_every_layer_is_skipped, BETWEEN, UNITS),
    Mutant(
        a_tile_begins_in_the_one_before,
        test_tiles.test_bits_bytes_and_collectives_of_tiles,
        dict(variant="gpt2", layout=test_tiles.Layout()),
    ),
]


@replaces("results_may_be_kept", collectives, linear)
def collectives_write_in_place(_):
    return False


@replaces("_is_written", ops)
def nobody_looks_whether_a_result_was_written_to(_, kept):
    return False


MUTANTS += [
    Mutant(
        collectives_write_in_place,
        test_ops.test_collectives_are_kept_rather_than_repeated_where_the_policy_names_them,
        dict(sequence_parallel=False, again={"allreduce_": 1}),
    ),
    Mutant(
        nobody_looks_whether_a_result_was_written_to,
        test_ops.test_a_result_that_is_written_to_later_or_after_the_layer_is_made_again,
    ),
]


@replaces("restored", layer_state.LayerState)
def a_replay_changes_buffers_once_more(_, self):
    return nullcontext()


@replaces("is_as_found", contents.Contents)
def a_layer_that_was_known_is_not_looked_at(_, self):
    return self.found is not None


@replaces("reusing", router.KeptChoices)
def a_router_chooses_anew_in_the_replay(_, self):
    return nullcontext()


@replaces("settle", arguments.Arguments)
def the_argument_that_was_written_to_is_replayed(settle, self, copies):
    return settle(self, {})


@replaces("drawn_again", replay)
def random_numbers_go_on_in_the_replay(_, states):
    return nullcontext()


@replaces("save", witness.Witness)
def saved_values_are_not_compared(_, self, tensor):
    pass


def case(name):
    return dict(name=name, policy="*:full", verify=False)


EVERY_KIND = test_silent.test_it_is_equal_or_refused
MUTANTS += [
    Mutant(a_replay_changes_buffers_once_more, EVERY_KIND, case("BatchNorm on zeros at first")),
    Mutant(
        the_argument_that_was_written_to_is_replayed,
        EVERY_KIND,
        case("an argument, which it writes"),
    ),
    Mutant(
        a_router_chooses_anew_in_the_replay,
        test_router.test_a_router_with_noise_trains_as_in_the_plain_model,
        dict(name="Mixtral", policy="*:full"),
        error="a replay is not what its forward was|the forward saved|as number",
    ),
    Mutant(
        a_layer_that_was_known_is_not_looked_at,
        test_known_layers.test_a_change_between_forward_and_backward_is_seen,
        dict(name="module"),
        error="a replay is not what its forward was",
    ),
    Mutant(random_numbers_go_on_in_the_replay, EVERY_KIND, case("the older spectral norm")),
    Mutant(
        saved_values_are_not_compared,
        test_hooked_refusals.test_verify_sees_other_values_where_the_shapes_agree,
        dict(policy="*:full"),
    ),
]


@replaces("finish", Offload)
def originals_are_freed_before_they_are_copied(_, self):
    for copy in self._before.copies:
        copy().original = None


@replaces("take", Pool)
def a_buffer_is_given_to_two(take, self, num_bytes):
    slot = take(self, num_bytes)
    self.add(slot._whole, slot.last_use)
    return slot


@replaces("call_back", _OnHost)
def backward_does_not_wait_for_the_copy_back(call_back, self):
    call_back(self)
    self._is_awaited = True


@replaces("take", Arena)
def a_slot_is_free_as_soon_as_it_is_taken(take, self, num_bytes):
    slot = take(self, num_bytes)
    self.add(slot._whole)
    return slot


LATE = test_offload.test_copies_that_are_made_as_late_as_they_may_be_change_no_gradient
ARENA = test_arena.test_there_is_one_allocation_for_each_kind_of_memory_of_the_planned_size
HOST_UNITS = dict(policy="*:full@host")

MUTANTS += [
    Mutant(originals_are_freed_before_they_are_copied, LATE, dict(policy="*:none@host")),
    Mutant(a_buffer_is_given_to_two, LATE, HOST_UNITS),
    Mutant(backward_does_not_wait_for_the_copy_back, LATE, HOST_UNITS),
    Mutant(
        a_slot_is_free_as_soon_as_it_is_taken,
        ARENA,
        dict(policy="*:full", sizes=[5 * test_arena.SLOT]),
    ),
]


test_is_seen = each_is_seen(MUTANTS)
