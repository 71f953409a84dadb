"""Mistakes in the engine for any model, each put back: a named test must fail."""

from __future__ import annotations

from contextlib import nullcontext

from megatron_lite.recompute import call_arguments as arguments
from megatron_lite.recompute import contents, layer_state, router, witness
from megatron_lite.recompute.randomness import GeneratorState, Randomness
from tests.recompute import test_hooked, test_hooked_refusals, test_router, test_silent
from tests.support import odd_layers
from tests.support.mutants import Mutant, each_is_seen, replaces


@replaces("restored", layer_state.LayerState)
def a_replay_changes_buffers_once_more(_, self):
    return nullcontext()


@replaces("_without_old_graphs", contents)
def an_attribute_holds_the_graph_of_the_forward_before(_, items, now):
    return items


@replaces("reusing", router.KeptChoices)
def a_router_chooses_anew_in_the_replay(_, self):
    return nullcontext()


@replaces("settle", arguments.Arguments)
def the_argument_that_was_written_to_is_replayed(settle, self, copies):
    return settle(self, {})


@replaces("replayed", Randomness)
def random_numbers_go_on_in_the_replay(_, self):
    return nullcontext()


@replaces("is_changed", GeneratorState)
def pythons_and_numpys_numbers_go_on_in_the_replay(_, self):
    return False


@replaces("version_of", contents)
def nobody_looks_whether_a_parameter_was_written_to(_, tensor):
    return 0


@replaces("save", witness.Witness)
def saved_values_are_not_compared(_, self, tensor, producer):
    pass


@replaces("MAX_PARTS", contents)
def objects_are_counted_twice(_):
    return 0


def kind(layer: type[odd_layers.Block], policy: str = "*:full") -> dict[str, object]:
    return dict(kind=layer, policy=policy, frozen=False, verify=False)


EVERY_KIND = test_hooked.test_every_kind_of_layer_has_the_gradients_and_the_state_of_the_plain_one
OUTLIVES = test_hooked.test_nothing_of_a_forward_outlives_it
OTHER = "the forward saved|as number"
WRITTEN = test_hooked_refusals.test_what_a_replay_needs_and_was_written_to_is_named
MUTANTS = [
    Mutant(a_replay_changes_buffers_once_more, EVERY_KIND, kind(odd_layers.Norms)),
    Mutant(
        an_attribute_holds_the_graph_of_the_forward_before,
        OUTLIVES,
        dict(policy="*:full", backward=False),
    ),
    Mutant(
        the_argument_that_was_written_to_is_replayed, EVERY_KIND, kind(odd_layers.WritesArgument)
    ),
    Mutant(
        a_router_chooses_anew_in_the_replay,
        test_router.test_a_router_with_noise_trains_as_in_the_plain_model,
        dict(name="Mixtral", policy="*:full"),
        error="a replay is not what its forward was|the forward saved|as number",
    ),
    Mutant(random_numbers_go_on_in_the_replay, EVERY_KIND, kind(odd_layers.Block)),
    Mutant(
        pythons_and_numpys_numbers_go_on_in_the_replay,
        EVERY_KIND,
        kind(odd_layers.HostGenerators),
        error=OTHER,
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
    Mutant(
        objects_are_counted_twice,
        test_silent.test_what_only_counts_is_counted_once,
        dict(policy="*:full", verify=False),
    ),
]


test_is_seen = each_is_seen(MUTANTS)
