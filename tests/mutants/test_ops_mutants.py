"""Mistakes in keeping the results of operators, each put back: a named test must fail."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from megatron_lite.config import operators
from megatron_lite.description import linears
from megatron_lite.parallel import collectives
from megatron_lite.recompute import hooked, ops, saved
from megatron_lite.recompute.randomness import Randomness
from megatron_lite.tensor_parallel import layers as linear
from tests.memory import test_layer_operators
from tests.recompute import test_ops
from tests.support.mutants import Mutant, assert_seen, replaces

Patch = pytest.MonkeyPatch


@replaces("matmul", operators.GROUPS)
def only_products_without_bias_are_matmuls(_):
    return ("aten.mm.default",)


def results_are_counted_over_the_whole_process(patch: Patch) -> None:
    choices = {}

    @replaces("Choice", ops)
    def shared(choice, names):
        return choices.setdefault(tuple(names), choice(names))

    shared(patch)


@replaces("replayed", Randomness)
def random_numbers_go_on_in_the_replay(_, self):
    return nullcontext()


@replaces("recomputing", hooked)
def a_replay_does_not_say_that_it_is_one(_):
    return nullcontext()


@replaces("_draws_dropout", ops)
def attention_with_dropout_is_kept(_, operator, args, kwargs):
    return False


@replaces("results_may_be_kept", collectives, linear)
def collectives_write_in_place(_):
    return False


@replaces("_is_written", ops)
def nobody_looks_whether_a_result_was_written_to(_, kept):
    return False


@replaces("tensor", saved.SavedValue)
def nobody_looks_whether_the_output_was_written_to(_, self):
    return self._packed.detach()


@replaces("_linear", linears)
def the_list_forgets_that_sharded_linears_add_their_bias_apart(linear, bias):
    return linear(True)


FLASH = dict(backend="flash", policy="ops(matmul)", per_layer={test_ops.FLASH: 1})
SECOND = dict(backend="flash", policy="ops(matmul/2,attention)", per_layer={"addmm": 1})

MUTANTS = [
    Mutant(
        only_products_without_bias_are_matmuls,
        test_ops.test_backward_runs_again_exactly_what_is_not_kept,
        FLASH,
    ),
    Mutant(
        results_are_counted_over_the_whole_process,
        test_ops.test_every_second_result_is_counted_anew_in_each_layer_and_each_forward,
    ),
    Mutant(
        random_numbers_go_on_in_the_replay,
        test_ops.test_a_replay_restores_streams_and_autocast_and_says_what_it_is,
    ),
    Mutant(
        attention_with_dropout_is_kept,
        test_ops.test_an_attention_kernel_is_not_kept_where_it_draws_its_dropout,
        dict(kernel=operators.GROUPS["attention"][1]),
    ),
    Mutant(
        collectives_write_in_place,
        test_ops.test_no_collective_that_writes_in_place_runs_where_results_are_kept,
        dict(sequence_parallel=False),
    ),
    Mutant(
        nobody_looks_whether_a_result_was_written_to,
        test_ops.test_a_result_that_is_written_to_later_is_not_kept,
    ),
    Mutant(
        nobody_looks_whether_the_output_was_written_to,
        test_ops.test_a_result_that_is_written_to_after_the_layer_is_an_error_in_backward,
    ),
    Mutant(
        the_list_forgets_that_sharded_linears_add_their_bias_apart,
        test_layer_operators.test_a_layers_operators_and_result_bytes_are_those_torch_dispatches,
        dict(tp_size=2, sequence_parallel=True),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_seen(mutant, monkeypatch)
