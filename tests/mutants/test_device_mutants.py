"""Mistakes that only a GPU would punish, each put into a training step: a named test must fail."""

from functools import partial

from megatron_lite.parallel import collectives
from megatron_lite.recompute.offload import CudaCopyStreams
from megatron_lite.training import graphs
from megatron_lite.training.step import StepEnd
from tests.support.mutants import Mutant, each_is_seen, replaces
from tests.training import test_graphs, test_step_times
from tests.training.test_device_hot_path import check_short_case


@replaces("wait", CudaCopyStreams)
def nothing_waits_for_a_copy(wait, self, mark):
    pass


@replaces("wait", collectives.Started)
def a_collective_is_read_before_it_ends(wait, self):
    return self.result


@replaces("read", StepEnd)
def figures_are_read_before_their_event(read, self, earlier):
    return dict(zip(self._names, self._values.tolist(), strict=True)), read(self, earlier)[1]


@replaces("captured", graphs)
def a_graph_keeps_the_first_batch(captured, step, inputs, *others):
    replay = captured(step, inputs, *others)
    return lambda new: replay(new | {"batches": inputs["batches"]})


@replaces("_shared_states", graphs)
def a_graph_does_not_go_back_for_a_replay(_shared_states, stretches):
    """Each seed has one state, as if all of its draws came one after the other."""
    begins = {}
    numbers = []
    for (seed, offset), _ in stretches:
        begins.setdefault(seed, (seed, offset))
        numbers.append(list(begins).index(seed))
    return list(begins.values()), numbers


LATE = partial(
    Mutant,
    test=test_step_times.test_figures_read_one_step_late_are_those_of_their_own_step_and_wait_for_no_other,
)
CAPTURED = partial(
    Mutant,
    test=test_graphs.test_a_captured_run_has_the_bits_of_one_without_graphs,
    arguments=dict(name="full"),
)
MUTANTS = [
    LATE(figures_are_read_before_their_event),
    Mutant(nothing_waits_for_a_copy, check_short_case, dict(number=0)),
    CAPTURED(a_graph_keeps_the_first_batch),
    CAPTURED(a_graph_does_not_go_back_for_a_replay),
    Mutant(a_collective_is_read_before_it_ends, check_short_case, dict(number=3)),
]


test_is_seen = each_is_seen(MUTANTS)
