"""Mistakes in the regions of a layer, each put back: a named test must fail. Discarding tensors,
tail skip, verification."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_lite.model import layer, norm
from megatron_lite.parallel import tensor_hash
from megatron_lite.recompute import checkpoint as engine
from megatron_lite.recompute import discard, saved, verify
from megatron_lite.recompute import layer_runner as runner
from megatron_lite.recompute import region_runner as regions
from megatron_lite.tensor_parallel import layers
from tests.parallel import test_tensor_hash
from tests.recompute import test_discard, test_tail, test_verify
from tests.support.mutants import Mutant, assert_seen, parameters, replaces

Patch = pytest.MonkeyPatch
Function, DiscardedOutputs = engine._Checkpoint, discard.DiscardedOutputs


@replaces("discard", DiscardedOutputs)
def nothing_is_discarded(_, self, output):
    pass


def what_is_discarded_stays_until_the_step_ends(patch: Patch) -> None:
    held = []

    @replaces("hooks", DiscardedOutputs)
    @contextmanager
    def holding(hooks, self) -> Iterator[None]:
        with hooks(self):
            yield
            held.append(dict(self._discarded))

    holding(patch)


@replaces("rebuilt_outputs", discard)
def every_consumer_rebuilds_for_itself(_, node):
    return engine._replay(node).outputs


@replaces("backward", Function)
def the_rebuilt_tensor_stays_after_backward(backward, ctx, *grads):
    replayed = ctx.replayed
    received = backward(ctx, *grads)
    ctx.replayed = replayed
    return received


@replaces("__init__", discard._Recipe)
def a_note_forgets_where_in_the_tensor_its_view_began(init, self, node, size, stride, offset):
    init(self, node, size, stride, 0)


@replaces("hooks_in_force", saved)
def the_hooks_in_force_are_replaced(_):
    return None


@replaces("rebuilt_outputs", discard)
def a_note_holds_the_tensor_that_it_stands_for(rebuilt, node):
    """Made anew in backward: the graph then holds itself."""
    outputs = rebuilt(node)
    node.outputs = [node, outputs]
    return outputs


@replaces("rms_norm", norm)
def the_norm_reads_its_input_twice(_, hidden_states, weight, epsilon):
    """Composed of torch's operations."""
    return weight * (
        hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + epsilon)
    )


@replaces("add_dropped_out", layer)
def a_skipped_tail_draws_no_mask(
    real, residual, branch, probability, *others, skip_tail=False, **more
):
    probability = 0.0 if skip_tail else probability
    return real(residual, branch, probability, *others, skip_tail=skip_tail, **more)


@replaces("_chain", runner)
def the_tail_of_every_layer_is_skipped(chain, plan, segment, part, rng, **facts):
    def run(hidden_states, *extras):
        for single in part:
            hidden_states = chain(plan, segment, [single], rng, **facts)(hidden_states, *extras)
        return hidden_states

    return run


@replaces("row_parallel_linear", layers)
def no_tail_is_skipped(real, *args, skip_tail=False, **facts):
    return real(*args, **facts)


@replaces("row_parallel_linear", layers)
def only_the_collective_of_a_tail_is_left(
    real, *args, skip_tail=False, tp_group, sequence_parallel, **facts
):
    """The matmul is skipped, the sum over the ranks is not."""
    output = real(
        *args, skip_tail=skip_tail, tp_group=tp_group, sequence_parallel=sequence_parallel, **facts
    )
    if skip_tail and tp_group is not None:
        torch.distributed.all_reduce(output.detach().contiguous(), group=tp_group)
    return output


@replaces("see", verify.Record)
def a_replay_is_not_compared(_, self, place, values):
    pass


@replaces("see_streams", verify.Execution)
def the_streams_are_not_compared(_, self, when, rng):
    pass


@replaces("see", verify.Record)
def the_message_names_the_unit_alone(see, self, place, values):
    return see(self, self.what, values)


@replaces("made", regions.Redraw)
def redrawn_masks_are_not_compared(_, self, tensor):
    return tensor


def _hash_of(patch: Patch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes the bytes that are hashed."""

    @replaces("_words", tensor_hash)
    def changed(words, tensor):
        return change(words(tensor).view(torch.uint8)).view(torch.int64)

    changed(patch)


def a_hash_is_of_the_first_bytes(patch: Patch) -> None:
    _hash_of(patch, lambda data: data[:8])


@replaces("_verified", regions.Regions)
def every_run_is_recorded(verified, self, *args):
    return verified(dataclasses.replace(self, verify=True), *args)


SHARE_ONE = test_discard.test_all_consumers_share_one_rebuild_of_a_tensor_that_was_freed
TAIL = test_tail.test_exactly_the_tails_are_skipped_and_no_gradient_changes
ONE_RANK = dict(tp_size=1, sequence_parallel=False)

MUTANTS = [
    Mutant(nothing_is_discarded, SHARE_ONE, dict(names=("linear",))),
    Mutant(
        nothing_is_discarded,
        test_discard.test_backward_reads_nothing_that_the_forward_left_behind,
        error="modified by an inplace operation",
    ),
    Mutant(every_consumer_rebuilds_for_itself, SHARE_ONE, dict(names=("linear", "square"))),
    Mutant(
        a_note_forgets_where_in_the_tensor_its_view_began,
        SHARE_ONE,
        dict(names=("square", "transposed_part", "linear")),
    ),
    Mutant(
        the_rebuilt_tensor_stays_after_backward,
        test_discard.test_each_backward_rebuilds_anew,
        error="a second time",
    ),
    Mutant(
        the_rebuilt_tensor_stays_after_backward,
        test_discard.test_two_backwards_through_lent_regions_equal_those_without,
        error="a second time",
    ),
    Mutant(
        what_is_discarded_stays_until_the_step_ends,
        test_discard.test_after_the_layer_nothing_is_held_for_discarding,
    ),
    Mutant(
        a_note_holds_the_tensor_that_it_stands_for,
        test_discard.test_a_graph_that_is_dropped_frees_what_it_kept_at_once,
    ),
    Mutant(
        the_hooks_in_force_are_replaced,
        test_discard.test_the_hooks_that_were_in_force_get_everything_but_the_discarded,
    ),
    Mutant(
        the_norm_reads_its_input_twice,
        test_discard.test_a_lent_norm_reads_its_input_once_so_that_gradients_meet_in_the_same_order,
    ),
    Mutant(a_skipped_tail_draws_no_mask, TAIL, ONE_RANK),
    Mutant(the_tail_of_every_layer_is_skipped, TAIL, ONE_RANK),
    Mutant(no_tail_is_skipped, TAIL, ONE_RANK),
    Mutant(
        only_the_collective_of_a_tail_is_left,
        TAIL,
        dict(tp_size=2, sequence_parallel=False),
        long=True,
    ),
    Mutant(a_replay_is_not_compared, test_verify.test_a_function_that_counts_its_runs_is_found),
    Mutant(
        a_replay_is_not_compared,
        test_verify.test_a_wrong_gather_is_found_at_the_units_input_on_every_rank,
        error="DID NOT RAISE RecomputeMismatch",
    ),
    Mutant(
        the_streams_are_not_compared,
        test_verify.test_a_replay_that_draws_more_is_found_though_it_returns_the_same,
    ),
    Mutant(
        the_message_names_the_unit_alone,
        test_verify.test_a_buffer_that_a_region_changes_is_found,
        dict(flags=test_verify.UNITS_OF_TWO),
    ),
    Mutant(
        redrawn_masks_are_not_compared, test_verify.test_a_mask_redrawn_from_other_numbers_is_found
    ),
    Mutant(
        a_hash_is_of_the_first_bytes,
        test_tensor_hash.test_it_depends_on_every_bit,
        dict(dtype=torch.float32),
    ),
    Mutant(
        every_run_is_recorded,
        test_verify.test_without_the_flag_nothing_is_recorded,
        dict(flags=test_verify.selective("mlp")),
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_is_seen(mutant: Mutant, monkeypatch: Patch) -> None:
    assert_seen(mutant, monkeypatch)
