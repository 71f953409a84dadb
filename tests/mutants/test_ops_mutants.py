"""Mistakes in keeping the results of operators, each put back: a named test must fail."""

from megatron_lite.parallel import collectives
from megatron_lite.recompute import ops
from megatron_lite.tensor_parallel import layers as linear
from tests.recompute import test_ops
from tests.support.mutants import Mutant, each_is_seen, replaces


@replaces("results_may_be_kept", collectives, linear)
def collectives_write_in_place(_):
    return False


@replaces("_is_written", ops)
def nobody_looks_whether_a_result_was_written_to(_, kept):
    return False


MUTANTS = [
    Mutant(
        collectives_write_in_place,
        test_ops.test_collectives_are_kept_rather_than_repeated_where_the_policy_names_them,
        dict(sequence_parallel=False, again={"allreduce_": 1}),
    ),
    Mutant(
        nobody_looks_whether_a_result_was_written_to,
        test_ops.test_a_result_that_is_written_to_later_is_not_kept,
    ),
]


test_is_seen = each_is_seen(MUTANTS)
