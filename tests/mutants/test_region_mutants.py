"""Mistakes in the regions of a layer, each put back: a named test must fail. Discarding tensors,
tail skip, verification."""

from __future__ import annotations

import pytest

from megatron_lite.model import layer
from megatron_lite.recompute import checkpoint as engine
from megatron_lite.recompute import discard, saved, verify
from megatron_lite.recompute import layer_runner as runner
from megatron_lite.recompute import region_runner as regions
from tests.recompute import test_discard, test_tail, test_verify
from tests.support.mutants import Mutant, assert_seen, parameters, replaces

Patch = pytest.MonkeyPatch
Function, DiscardedOutputs = engine._Checkpoint, discard.DiscardedOutputs


@replaces("discard", DiscardedOutputs)
def nothing_is_discarded(_, self, output):
    pass


@replaces("__init__", discard._Recipe)
def a_note_forgets_where_in_the_tensor_its_view_began(init, self, node, size, stride, offset):
    init(self, node, size, stride, 0)


@replaces("hooks_in_force", saved)
def the_hooks_in_force_are_replaced(_):
    return None


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


@replaces("see", verify.Record)
def a_replay_is_not_compared(_, self, place, values):
    pass


@replaces("see_streams", verify.Execution)
def the_streams_are_not_compared(_, self, when, rng):
    pass


@replaces("made", regions.Redraw)
def redrawn_masks_are_not_compared(_, self, tensor):
    return tensor


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
    Mutant(
        a_note_forgets_where_in_the_tensor_its_view_began,
        SHARE_ONE,
        dict(names=("square", "transposed_part", "linear")),
    ),
    Mutant(
        the_hooks_in_force_are_replaced,
        test_discard.test_the_hooks_that_were_in_force_get_everything_but_the_discarded,
    ),
    Mutant(a_skipped_tail_draws_no_mask, TAIL, ONE_RANK),
    Mutant(the_tail_of_every_layer_is_skipped, TAIL, ONE_RANK),
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
        redrawn_masks_are_not_compared, test_verify.test_a_mask_redrawn_from_other_numbers_is_found
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_is_seen(mutant: Mutant, monkeypatch: Patch) -> None:
    assert_seen(mutant, monkeypatch)
