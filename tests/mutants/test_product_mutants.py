"""Mistakes in the sums of weight gradients, each put back: a named test must fail."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.parallel import products, weight_gradient
from tests.memory import test_step_peak
from tests.parallel import test_products
from tests.support.mutants import Mutant, assert_seen, parameters, replaces
from tests.tensor_parallel import test_layers


@replaces("add_weight_product_", products)
def the_first_micro_batch_reads_the_total(add, total, rows, grad_rows, *, first):
    add(total, rows, grad_rows, first=False)


@replaces("add_rows_", weight_gradient)
def a_lookup_adds_to_the_sum_of_an_earlier_step(add, total, ids, rows, *, first):
    add(total, ids, rows, first=False)


@replaces("product_rows", products)
def every_part_of_a_product_is_the_whole(_, width):
    return 2**31


MUTANTS = [
    Mutant(
        the_first_micro_batch_reads_the_total,
        test_products.test_a_product_is_added_to_the_sum_and_the_first_one_overwrites_it,
        dict(n=7, k=5),
    ),
    Mutant(
        a_lookup_adds_to_the_sum_of_an_earlier_step,
        test_layers.test_gradients_of_lookups_are_added_to_the_sum_of_a_step,
        dict(dtype=torch.bfloat16),
    ),
    Mutant(
        every_part_of_a_product_is_the_whole,
        test_step_peak.test_a_large_16_bit_gradient_never_exists_whole,
        dict(untied=""),
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_seen(mutant, monkeypatch)
