"""Mistakes in the regions of a layer, each put back: a named test must fail. Lent tensors, tail skip, verification."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megatron_lite.model import layer, norm
from megatron_lite.recompute import checkpoint as engine
from megatron_lite.recompute import discard, regions, runner, saved, verify
from megatron_lite.tensor_parallel import layers
from tests.recompute import test_discard, test_tail, test_verify
from tests.support.mutants import Mutant, assert_seen

Patch = pytest.MonkeyPatch
Function, Lending = engine._Checkpoint, discard.Lending


def nothing_is_lent(patch: Patch) -> None:
    patch.setattr(Lending, "lend", lambda self, output: None)


def what_is_lent_stays_until_the_step_ends(patch: Patch) -> None:
    hooks, held = Lending.hooks, []

    @contextmanager
    def holding(self) -> Iterator[None]:
        with hooks(self):
            yield
            held.append(dict(self._lent))

    patch.setattr(Lending, "hooks", holding)


def every_consumer_rebuilds_for_itself(patch: Patch) -> None:
    patch.setattr(discard, "rebuilt_outputs", lambda node: engine._replay(node).outputs)


def the_rebuilt_tensor_stays_after_backward(patch: Patch) -> None:
    backward = Function.backward

    def keeping(ctx, *grads):
        replayed = ctx.replayed
        received = backward(ctx, *grads)
        ctx.replayed = replayed
        return received

    patch.setattr(Function, "backward", staticmethod(keeping))


def a_note_forgets_where_in_the_tensor_its_view_began(patch: Patch) -> None:
    class Note(discard._Note):
        def __init__(self, node, size, stride, offset):
            super().__init__(node, size, stride, 0)

    patch.setattr(discard, "_Note", Note)


def the_hooks_in_force_are_replaced(patch: Patch) -> None:
    patch.setattr(saved, "hooks_in_force", lambda: None)


def a_note_holds_the_tensor_that_it_stands_for(patch: Patch) -> None:
    """Made anew in backward: the graph then holds itself."""
    rebuilt = discard.rebuilt_outputs

    def kept_on_its_own_node(node):
        outputs = rebuilt(node)
        node.outputs = [node, outputs]
        return outputs

    patch.setattr(discard, "rebuilt_outputs", kept_on_its_own_node)


def the_norm_reads_its_input_twice(patch: Patch) -> None:
    """Composed of torch's operations."""
    patch.setattr(norm, "rms_norm", lambda hidden_states, weight, epsilon: weight * (
        hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + epsilon)))


def a_skipped_tail_draws_no_mask(patch: Patch) -> None:
    real = layer.add_dropped_out
    patch.setattr(layer, "add_dropped_out", lambda residual, branch, probability, *others, unread=False: real(
        residual, branch, 0.0 if unread else probability, *others, unread=unread))


def the_tail_of_every_layer_is_skipped(patch: Patch) -> None:
    chain = runner._chain

    def one_by_one(plan, segment, part, rng, **facts):
        def run(hidden_states, *extras):
            for single in part:
                hidden_states = chain(plan, segment, [single], rng, **facts)(hidden_states, *extras)
            return hidden_states

        return run

    patch.setattr(runner, "_chain", one_by_one)


def no_tail_is_skipped(patch: Patch) -> None:
    real = layers.row_parallel_linear
    patch.setattr(layers, "row_parallel_linear", lambda *args, unread=False, **facts: real(*args, **facts))


def only_the_collective_of_a_tail_is_left(patch: Patch) -> None:
    """The matmul is skipped, the sum over the ranks is not."""
    real = layers.row_parallel_linear

    def linear(*args, unread=False, tp_group, sequence_parallel, **facts):
        output = real(*args, unread=unread, tp_group=tp_group, sequence_parallel=sequence_parallel, **facts)
        if unread and tp_group is not None:
            torch.distributed.all_reduce(output.detach().contiguous(), group=tp_group)
        return output

    patch.setattr(layers, "row_parallel_linear", linear)


def a_replay_is_not_compared(patch: Patch) -> None:
    patch.setattr(verify.Record, "see", lambda self, place, values: None)


def the_streams_are_not_compared(patch: Patch) -> None:
    patch.setattr(verify.Record, "_streams", lambda self: {})


def the_message_names_the_unit_alone(patch: Patch) -> None:
    see = verify.Record.see
    patch.setattr(verify.Record, "see", lambda self, place, values: see(self, self.what, values))


def redrawn_masks_are_not_compared(patch: Patch) -> None:
    patch.setattr(regions.Redraw, "made", lambda self, tensor: tensor)


def _hash_of(change: Callable[[bytes], bytes]) -> SimpleNamespace:
    real = verify.hashlib.blake2b
    return SimpleNamespace(blake2b=lambda data, **facts: real(change(data), **facts))


def a_digest_is_of_the_bytes_in_any_order(patch: Patch) -> None:
    patch.setattr(verify, "hashlib", _hash_of(lambda data: bytes(sorted(data))))


def a_digest_is_of_the_first_bytes(patch: Patch) -> None:
    patch.setattr(verify, "hashlib", _hash_of(lambda data: data[:4]))


def a_digest_is_of_absolute_values(patch: Patch) -> None:
    patch.setattr(verify, "hashlib", _hash_of(lambda data: bytes(byte & 0x7F for byte in data)))


def every_run_is_recorded(patch: Patch) -> None:
    verified = regions.Regions._verified
    patch.setattr(regions.Regions, "_verified", lambda self, *args: verified(dataclasses.replace(self, verify=True), *args))


SHARE_ONE = test_discard.test_all_consumers_share_one_rebuild_of_a_tensor_that_was_freed
TAIL = test_tail.test_exactly_the_tails_are_skipped_and_no_gradient_changes
ONE_RANK = dict(tp_size=1, sequence_parallel=False)

MUTANTS = [
    Mutant(nothing_is_lent, SHARE_ONE, dict(names=("linear",))),
    Mutant(nothing_is_lent, test_discard.test_backward_reads_nothing_that_the_forward_left_behind),
    Mutant(every_consumer_rebuilds_for_itself, SHARE_ONE, dict(names=("linear", "square"))),
    Mutant(a_note_forgets_where_in_the_tensor_its_view_began, SHARE_ONE, dict(names=("square", "transposed_part", "linear"))),
    Mutant(the_rebuilt_tensor_stays_after_backward, test_discard.test_each_backward_rebuilds_anew, error="a second time"),
    Mutant(the_rebuilt_tensor_stays_after_backward, test_discard.test_two_backwards_through_lent_regions_equal_those_without,
           error="a second time"),
    Mutant(what_is_lent_stays_until_the_step_ends, test_discard.test_after_the_layer_nothing_is_held_for_lending),
    Mutant(a_note_holds_the_tensor_that_it_stands_for, test_discard.test_a_graph_that_is_dropped_frees_what_it_kept_at_once),
    Mutant(the_hooks_in_force_are_replaced, test_discard.test_the_hooks_that_were_in_force_get_everything_but_the_lent),
    Mutant(the_norm_reads_its_input_twice,
           test_discard.test_a_lent_norm_reads_its_input_once_so_that_gradients_meet_in_the_same_order),

    Mutant(a_skipped_tail_draws_no_mask, TAIL, ONE_RANK),
    Mutant(the_tail_of_every_layer_is_skipped, TAIL, ONE_RANK),
    Mutant(no_tail_is_skipped, TAIL, ONE_RANK),
    Mutant(only_the_collective_of_a_tail_is_left, TAIL, dict(tp_size=2, sequence_parallel=False)),

    Mutant(a_replay_is_not_compared, test_verify.test_a_function_that_counts_its_runs_is_found),
    Mutant(a_replay_is_not_compared, test_verify.test_a_wrong_gather_is_found_at_the_units_input_on_every_rank,
           error="DID NOT RAISE RecomputeMismatch"),
    Mutant(the_streams_are_not_compared, test_verify.test_a_replay_that_draws_more_is_found_though_it_returns_the_same),
    Mutant(the_message_names_the_unit_alone, test_verify.test_a_buffer_that_a_region_changes_is_found,
           dict(flags=test_verify.UNITS_OF_TWO)),
    Mutant(redrawn_masks_are_not_compared, test_verify.test_a_mask_redrawn_from_other_numbers_is_found),
    Mutant(a_digest_is_of_the_bytes_in_any_order, test_verify.test_a_digest_tells_lengths_signs_and_orders_apart),
    Mutant(a_digest_is_of_the_first_bytes, test_verify.test_a_digest_depends_on_every_bit, dict(dtype=torch.float32)),
    Mutant(a_digest_is_of_absolute_values, test_verify.test_a_digest_tells_lengths_signs_and_orders_apart),
    Mutant(every_run_is_recorded, test_verify.test_without_the_flag_nothing_is_recorded,
           dict(flags=test_verify.selective("mlp"))),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: Patch) -> None:
    assert_seen(mutant, monkeypatch)
