"""Mistakes in the regions of a layer, each put back: a named test must fail. Discarding tensors,
tail skip, verification."""

from contextlib import contextmanager

from megatron_lite.model import layer
from megatron_lite.recompute import layer_runner as runner
from megatron_lite.recompute import tiles
from tests.recompute import test_discard, test_runner, test_tiles
from tests.support.mutants import Mutant, each_is_seen, replaces


@replaces("discarding", test_discard)
@contextmanager
def nothing_is_discarded(_):
    yield lambda output: None


@replaces("add_dropped_out", layer)
def a_skipped_tail_draws_no_mask(
    real, residual, branch, probability, *others, skip_tail=False, **more
):
    probability = 0.0 if skip_tail else probability
    return real(residual, branch, probability, *others, skip_tail=skip_tail, **more)


@replaces("_chain", runner)
def the_tail_of_every_layer_is_skipped(chain, plan, segment, part, *others, **facts):
    def run(hidden_states, *extras):
        for single in part:
            layer = chain(plan, segment, [single], *others, **facts)
            hidden_states = layer(hidden_states, *extras)
        return hidden_states

    return run


@replaces("tiles_of", tiles)
def a_tile_begins_in_the_one_before(tiles_of, whole, number):
    return [slice(max(0, tile.start - 1), tile.stop) for tile in tiles_of(whole, number)]


SHARE_ONE = test_discard.test_all_consumers_share_one_rebuild_of_a_tensor_that_was_freed
TAIL = test_runner.test_what_runs_between_forward_and_backward_changes_nothing
UNITS = dict(recompute=test_runner.UNITS_OF_TWO)

MUTANTS = [
    Mutant(nothing_is_discarded, SHARE_ONE, dict(names=("linear",))),
    Mutant(a_skipped_tail_draws_no_mask, TAIL, UNITS),
    Mutant(the_tail_of_every_layer_is_skipped, TAIL, UNITS),
    Mutant(
        a_tile_begins_in_the_one_before,
        test_tiles.test_bits_bytes_and_collectives_of_tiles,
        dict(variant="gpt2", layout=test_tiles.Layout()),
    ),
]


test_is_seen = each_is_seen(MUTANTS)
