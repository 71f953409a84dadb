"""Mistakes of recompute engines, most of them once shipped by some system, each put back: a named
test must fail.

Here: randomness, units of layers, split inputs, and what goes in and out of the Function. Regions:
test_region_mutants.py.
"""

from contextlib import contextmanager

import torch

from megatron_lite.model import layer
from megatron_lite.parallel.rng import DEFAULT, TENSOR_PARALLEL
from megatron_lite.recompute import checkpoint as engine
from megatron_lite.recompute import layer_runner as runner
from megatron_lite.recompute import randomness
from megatron_lite.recompute.phase import is_recomputing
from tests.recompute import test_checkpoint, test_runner, test_split
from tests.support.mutants import Mutant, each_is_seen, replaces

Function, Randomness = engine._Checkpoint, randomness.Randomness


@replaces("replayed", Randomness)
@contextmanager
def the_replay_advances_the_kept_states(replayed, self):
    """The caller's dict of states is put into the tracker, not copies."""
    with replayed(self):
        yield
        for name, state in self.states.items():
            state.data.copy_(Randomness.now(self.streams).states[name])


@replaces("now", Randomness)
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


@replaces("_chain", runner)
def every_layer_of_a_unit_gets_the_units_input(chain, plan, segment, part, *others, **facts):
    return chain(plan, segment, part[-1:], *others, **facts)


@replaces("_whole_input", engine)
def parts_are_gathered_in_the_wrong_order(whole_input, ctx, shard):
    return whole_input(ctx, shard).roll(1, 0)


def the_callers_tensor_becomes_its_part(patch):
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


SAME_NUMBERS = test_checkpoint.test_every_backward_sees_the_numbers_of_the_forward
BETWEEN = test_runner.test_what_runs_between_forward_and_backward_changes_nothing
UNITS = dict(recompute=test_runner.UNITS_OF_TWO)
LEFT_ALONE = test_split.test_the_callers_tensor_is_left_alone
SPLIT = test_split.test_inputs_are_gathered_one_ahead_of_the_replay


MUTANTS = [
    # A replay restores every stream, the current one's name and the CPU's generator, as copies, and
    # leaves no trace.
    Mutant(the_replay_advances_the_kept_states, SAME_NUMBERS, dict(times=2)),
    Mutant(
        the_cpu_generator_is_forgotten,
        test_checkpoint.test_a_replay_repeats_the_cpu_generator_beside_the_streams_of_a_device,
        dict(times=1),
    ),
    # Units, and the stream of their masks.
    Mutant(residual_masks_of_a_replay_come_from_the_other_stream, BETWEEN, UNITS),
    Mutant(every_layer_of_a_unit_gets_the_units_input, BETWEEN, UNITS),
    # Split inputs.
    Mutant(the_callers_tensor_becomes_its_part, LEFT_ALONE, dict(grad=True), "size of tensor a"),
    Mutant(parts_are_gathered_in_the_wrong_order, SPLIT),
]


test_is_seen = each_is_seen(MUTANTS)
