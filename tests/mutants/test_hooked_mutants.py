"""Mistakes in the engine for any model, each put back: a named test must fail."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
from torch import nn

from megatron_lite.recompute import (
    caches,
    graph,
    hooked,
    layer_state,
    ops,
    own_generators,
    saved,
    surroundings,
    witness,
)
from megatron_lite.recompute import call_arguments as arguments
from megatron_lite.recompute.randomness import Randomness
from tests.recompute import (
    test_families,
    test_hooked,
    test_hooked_refusals,
    test_other_ways,
    test_silent,
)
from tests.support import odd_layers
from tests.support.mutants import Mutant, assert_seen, replaces

Patch = pytest.MonkeyPatch


@replaces("restored", layer_state.LayerState)
def a_replay_changes_buffers_once_more(_, self):
    return nullcontext()


@replaces("put", layer_state._HolderState)
def weights_are_those_of_backward(put, self, again, around):
    self.registries.pop("_parameters")
    return put(self, again, around)


@replaces("settle", layer_state._HolderState)
def an_attribute_holds_the_graph_of_the_forward_before(_, self):
    pass


@replaces("settle", arguments._Tensor)
def the_argument_that_was_written_to_is_replayed(settle, self, is_written):
    return settle(self, False)


@replaces("replayed", Randomness)
def random_numbers_go_on_in_the_replay(_, self):
    return nullcontext()


@replaces("drawn_again", layer_state)
def a_generator_of_the_layer_goes_on_in_the_replay(_, states):
    return nullcontext()


@replaces("is_changed", own_generators.GeneratorState)
def pythons_and_numpys_numbers_go_on_in_the_replay(_, self):
    return False


@replaces("autocast_states", surroundings)
def autocast_is_that_of_backward(_, kinds):
    return []


@replaces("_forget", hooked._LayerCall)
def the_values_of_one_backward_serve_the_next(_, self, task):
    pass


@replaces("tensor", saved.SavedValue)
def nobody_looks_whether_an_argument_was_written_to(_, self):
    return (self._packed if self._unpack is None else self._unpack(self._packed)).detach()


@replaces("version_of", layer_state)
def nobody_looks_whether_a_parameter_was_written_to(_, tensor):
    return 0


@replaces("save", witness.Witness)
def saved_values_are_not_compared(_, self, tensor, producer):
    pass


@replaces("of", graph.Graph)
def the_graph_is_not_compared(_, results, inputs):
    return graph.Graph()


@replaces("settle", layer_state.LayerState)
def a_first_call_that_wrote_to_a_parameter_is_rebuilt(settle, self):
    settle(self)
    return True


@replaces("has_attributes", layer_state)
def objects_are_counted_twice(_, value):
    return False


@replaces("_copied", caches)
def layers_fill_the_callers_cache(_, cache):
    return cache


@replaces("see_write", ops.KeptResults)
def writes_through_uncounted_views_are_not_seen(_, self, operator, args, kwargs):
    pass


def kind(layer: type[odd_layers.Block], policy: str = "*:full") -> dict[str, object]:
    return dict(kind=layer, policy=policy, frozen=False, verify=False)


EVERY_KIND = test_hooked.test_every_kind_of_layer_has_the_gradients_and_the_state_of_the_plain_one
EVERY_BACKWARD = test_hooked.test_every_kind_of_backward_gives_the_plain_gradients
OUTLIVES = test_hooked.test_nothing_of_a_forward_outlives_it
OTHER = "the forward saved|as number"
WRITTEN = test_hooked_refusals.test_what_a_replay_needs_and_was_written_to_is_named
MUTANTS = [
    Mutant(a_replay_changes_buffers_once_more, EVERY_KIND, kind(odd_layers.Norms)),
    Mutant(a_replay_changes_buffers_once_more, EVERY_KIND, kind(odd_layers.Spectral)),
    Mutant(
        weights_are_those_of_backward,
        EVERY_BACKWARD,
        dict(kind=odd_layers.Block, policy="*:full", run=test_hooked.other_weights),
        error="a replay is not what its forward was",
    ),
    Mutant(
        an_attribute_holds_the_graph_of_the_forward_before,
        OUTLIVES,
        dict(policy="*:full", backward=False),
    ),
    Mutant(
        the_argument_that_was_written_to_is_replayed, EVERY_KIND, kind(odd_layers.WritesArgument)
    ),
    Mutant(random_numbers_go_on_in_the_replay, EVERY_KIND, kind(odd_layers.Block)),
    Mutant(
        a_generator_of_the_layer_goes_on_in_the_replay, EVERY_KIND, kind(odd_layers.OwnGenerator)
    ),
    Mutant(
        pythons_and_numpys_numbers_go_on_in_the_replay,
        EVERY_KIND,
        kind(odd_layers.HostGenerators),
        error=OTHER,
    ),
    Mutant(
        autocast_is_that_of_backward,
        EVERY_BACKWARD,
        dict(kind=odd_layers.Block, policy="*:full", run=test_hooked.autocast),
        error="bfloat16",
    ),
    Mutant(
        the_values_of_one_backward_serve_the_next,
        test_hooked.test_what_a_backward_did_not_read_does_not_outlive_it,
    ),
    Mutant(
        nobody_looks_whether_an_argument_was_written_to,
        WRITTEN,
        dict(zip(("between", "message"), test_hooked_refusals.WRITES[0], strict=True)),
    ),
    Mutant(
        nobody_looks_whether_a_parameter_was_written_to,
        WRITTEN,
        dict(zip(("between", "message"), test_hooked_refusals.WRITES[1], strict=True)),
    ),
    Mutant(
        saved_values_are_not_compared,
        test_hooked_refusals.test_verify_sees_other_values_where_the_shapes_agree,
        dict(policy="*:full"),
    ),
    Mutant(the_graph_is_not_compared, test_hooked_refusals.test_verify_sees_a_lost_edge),
    Mutant(
        a_first_call_that_wrote_to_a_parameter_is_rebuilt,
        test_silent.test_it_is_equal_or_refused,
        dict(name="its own parameter, which it writes", policy="*:full", verify=False),
    ),
    Mutant(
        objects_are_counted_twice,
        test_silent.test_what_only_counts_is_counted_once,
        dict(policy="*:full", verify=False),
    ),
    Mutant(
        layers_fill_the_callers_cache,
        test_families.test_the_default_call_of_a_family_trains_as_without_a_policy,
        dict(name="GPT-2", text="*:full"),
    ),
    Mutant(
        writes_through_uncounted_views_are_not_seen,
        test_other_ways.test_results_that_a_layer_writes_to_are_computed_again,
        dict(kind=partial(nn.GRUCell, 6, 6), ops="matmul"),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_seen(mutant, monkeypatch)
