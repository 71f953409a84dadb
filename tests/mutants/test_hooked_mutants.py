"""Mistakes in the engine for any model, each put back: a named test must fail."""

from __future__ import annotations

from contextlib import nullcontext

from megatron_lite.recompute import call_arguments as arguments
from megatron_lite.recompute import layer_state, router, witness
from megatron_lite.recompute.randomness import Randomness
from tests.recompute import test_hooked, test_hooked_refusals, test_router
from tests.support import odd_layers
from tests.support.mutants import Mutant, each_is_seen, replaces


@replaces("restored", layer_state.LayerState)
def a_replay_changes_buffers_once_more(_, self):
    return nullcontext()


@replaces("reusing", router.KeptChoices)
def a_router_chooses_anew_in_the_replay(_, self):
    return nullcontext()


@replaces("settle", arguments.Arguments)
def the_argument_that_was_written_to_is_replayed(settle, self, copies):
    return settle(self, {})


@replaces("replayed", Randomness)
def random_numbers_go_on_in_the_replay(_, self):
    return nullcontext()


@replaces("save", witness.Witness)
def saved_values_are_not_compared(_, self, tensor, producer):
    pass


def kind(layer: type[odd_layers.Block], policy: str = "*:full") -> dict[str, object]:
    return dict(kind=layer, policy=policy, frozen=False, verify=False)


EVERY_KIND = test_hooked.test_every_kind_of_layer_has_the_gradients_and_the_state_of_the_plain_one
MUTANTS = [
    Mutant(a_replay_changes_buffers_once_more, EVERY_KIND, kind(odd_layers.Norms)),
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
        saved_values_are_not_compared,
        test_hooked_refusals.test_verify_sees_other_values_where_the_shapes_agree,
        dict(policy="*:full"),
    ),
]


test_is_seen = each_is_seen(MUTANTS)
