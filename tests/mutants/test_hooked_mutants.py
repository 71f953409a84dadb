"""Mistakes in the engine for any model, each put back: a named test must fail."""

from contextlib import nullcontext

from megatron_lite.recompute import call_arguments as arguments
from megatron_lite.recompute import layer_state, router, witness
from megatron_lite.recompute.randomness import Randomness
from tests.recompute import test_hooked_refusals, test_router, test_silent
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
def saved_values_are_not_compared(_, self, tensor):
    pass


def case(name):
    return dict(name=name, policy="*:full", verify=False)


EVERY_KIND = test_silent.test_it_is_equal_or_refused
MUTANTS = [
    Mutant(a_replay_changes_buffers_once_more, EVERY_KIND, case("BatchNorm")),
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
    Mutant(random_numbers_go_on_in_the_replay, EVERY_KIND, case("dropout alone")),
    Mutant(
        saved_values_are_not_compared,
        test_hooked_refusals.test_verify_sees_other_values_where_the_shapes_agree,
        dict(policy="*:full"),
    ),
]


test_is_seen = each_is_seen(MUTANTS)
