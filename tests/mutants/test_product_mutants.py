"""Mistakes in the products by oneDNN, each put back: a named test must fail."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.config import large_products
from megatron_lite.parallel import products, weight_gradient
from megatron_lite.recompute import ops
from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.tensor_parallel import column_linear, row_linear
from tests.memory import test_step_peak
from tests.parallel import test_products
from tests.support.changes import with_fields
from tests.support.mutants import Mutant, assert_seen, parameters, replaces
from tests.tensor_parallel import test_lookup

Patch = pytest.MonkeyPatch


@replaces("by_onednn", products)
def a_replay_takes_the_other_path(by_onednn, left, right, onednn):
    return by_onednn(left, right, onednn) and not is_recomputing()


@replaces("input_gradient", column_linear, row_linear)
def backward_has_a_higher_threshold(input_gradient, grad_output, weight, *, onednn):
    large = grad_output.numel() * weight.shape[1] > products.LEAST_MULTIPLICATIONS
    return input_gradient(grad_output, weight, onednn=onednn and large)


@replaces("by_onednn", products)
def sixteen_bits_go_to_onednn(_, left, right, onednn):
    return onednn


@replaces("is_grad_enabled", torch)
def a_recorded_backward_meets_onednn(_):
    return False


@replaces("STAND_INS", ops)
def a_policy_does_not_know_the_operators(_):
    return {}


@replaces("add_weight_product_", products)
def the_first_micro_batch_reads_the_total(add, total, rows, grad_rows, *, first, onednn):
    add(total, rows, grad_rows, first=False, onednn=onednn)


@replaces("add_rounded_", products)
def the_first_rounded_product_reads_the_total(add, total, product, *, first):
    add(total, product, first=False)


@replaces("add_rows_", weight_gradient)
def a_lookup_adds_to_the_sum_of_an_earlier_step(add, total, ids, rows, *, first):
    add(total, ids, rows, first=False)


@replaces("index_add_", torch.Tensor)
def of_equal_ids_the_last_one_counts(_, total, dim, ids, rows):
    return total.index_copy_(dim, ids, rows)


@replaces("product_rows", products)
def every_part_of_a_product_is_the_whole(_, width, device):
    return 2**31


@replaces("gradient_parts", large_products)
def the_workspace_forgets_the_transposed_copy(parts, tokens, outputs, inputs):
    return with_fields(parts(tokens, outputs, inputs), transposed=0)


MUTANTS = [
    Mutant(
        a_replay_takes_the_other_path,
        test_products.test_no_policy_changes_a_bit,
        dict(tp_size=1, sequence_parallel=False),
        error="is invalid for input",  # a kept result of one operator is no result of the other
    ),
    Mutant(
        backward_has_a_higher_threshold,
        test_products.test_the_three_products_of_a_layer_take_the_same_path,
        dict(layer=test_products.row_parallel_linear),
    ),
    Mutant(
        sixteen_bits_go_to_onednn,
        test_products.test_other_formats_stay_with_torch,
        dict(dtype=torch.bfloat16),
    ),
    Mutant(
        a_recorded_backward_meets_onednn,
        test_products.test_a_recorded_backward_runs_torchs_products,
    ),
    Mutant(
        a_policy_does_not_know_the_operators,
        test_products.test_a_policy_takes_the_operator_for_the_one_in_whose_place_it_runs,
        dict(policy="*:ops(matmul,attention)", replayed=0),
    ),
    Mutant(
        the_first_micro_batch_reads_the_total,
        test_products.test_each_product_is_the_exact_one_up_to_rounding,
        dict(n=7, k=5, with_bias=False),
    ),
    Mutant(
        the_first_rounded_product_reads_the_total,
        test_products.test_a_16_bit_product_is_rounded_once_and_added_to_the_float32_sum,
        dict(rows=4, first=True),
    ),
    Mutant(
        a_lookup_adds_to_the_sum_of_an_earlier_step,
        test_lookup.test_gradients_of_lookups_are_added_to_the_sum_of_a_step,
        dict(dtype=torch.bfloat16),
    ),
    Mutant(
        of_equal_ids_the_last_one_counts,
        test_products.test_rows_are_added_one_after_the_other,
        dict(dtype=torch.float32, first=False),
    ),
    Mutant(
        every_part_of_a_product_is_the_whole,
        test_step_peak.test_a_large_16_bit_gradient_never_exists_whole,
        dict(untied=""),
    ),
    Mutant(
        the_workspace_forgets_the_transposed_copy,
        test_products.test_a_weight_gradient_allocates_exactly_the_predicted_parts,
        dict(n=90, k=33, m=130),
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_seen(mutant, monkeypatch)
