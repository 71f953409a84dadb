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
from tests.support.mutants import Mutant, assert_seen, parameters

Patch = pytest.MonkeyPatch
Function, DiscardedOutputs = engine._Checkpoint, discard.DiscardedOutputs


def nothing_is_discarded(patch: Patch) -> None:
    patch.setattr(DiscardedOutputs, "discard", lambda self, output: None)


def what_is_discarded_stays_until_the_step_ends(patch: Patch) -> None:
    hooks, held = DiscardedOutputs.hooks, []

    @contextmanager
    def holding(self) -> Iterator[None]:
        with hooks(self):
            yield
            held.append(dict(self._discarded))

    patch.setattr(DiscardedOutputs, "hooks", holding)


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
    class Note(discard._Recipe):
        def __init__(self, node, size, stride, offset):
            super().__init__(node, size, stride, 0)

    patch.setattr(discard, "_Recipe", Note)


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
    patch.setattr(
        norm,
        "rms_norm",
        lambda hidden_states, weight, epsilon: (
            weight
            * (hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + epsilon))
        ),
    )


def a_skipped_tail_draws_no_mask(patch: Patch) -> None:
    real = layer.add_dropped_out
    patch.setattr(
        layer,
        "add_dropped_out",
        lambda residual, branch, probability, *others, skip_tail=False: real(
            residual, branch, 0.0 if skip_tail else probability, *others, skip_tail=skip_tail
        ),
    )


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
    patch.setattr(
        layers, "row_parallel_linear", lambda *args, skip_tail=False, **facts: real(*args, **facts)
    )


def only_the_collective_of_a_tail_is_left(patch: Patch) -> None:
    """The matmul is skipped, the sum over the ranks is not."""
    real = layers.row_parallel_linear

    def linear(*args, skip_tail=False, tp_group, sequence_parallel, **facts):
        output = real(
            *args,
            skip_tail=skip_tail,
            tp_group=tp_group,
            sequence_parallel=sequence_parallel,
            **facts,
        )
        if skip_tail and tp_group is not None:
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


def _hash_of(patch: Patch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes the bytes that are hashed."""
    words = tensor_hash._words
    patch.setattr(
        tensor_hash,
        "_words",
        lambda tensor: change(words(tensor).view(torch.uint8)).view(torch.int64),
    )


def a_hash_is_of_the_bytes_in_any_order(patch: Patch) -> None:
    _hash_of(patch, lambda data: data.sort().values)


def a_hash_is_of_the_first_bytes(patch: Patch) -> None:
    _hash_of(patch, lambda data: data[:8])


def a_hash_is_of_absolute_values(patch: Patch) -> None:
    _hash_of(patch, lambda data: data & 0x7F)


def every_run_is_recorded(patch: Patch) -> None:
    verified = regions.Regions._verified
    patch.setattr(
        regions.Regions,
        "_verified",
        lambda self, *args: verified(dataclasses.replace(self, verify=True), *args),
    )


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
        a_hash_is_of_the_bytes_in_any_order,
        test_tensor_hash.test_it_tells_lengths_signs_and_orders_apart,
    ),
    Mutant(
        a_hash_is_of_the_first_bytes,
        test_tensor_hash.test_it_depends_on_every_bit,
        dict(dtype=torch.float32),
    ),
    Mutant(
        a_hash_is_of_absolute_values, test_tensor_hash.test_it_tells_lengths_signs_and_orders_apart
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
