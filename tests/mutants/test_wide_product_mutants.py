"""Mistakes in 16-bit products in float32, each put back: a named test must fail."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.description import core_attention_workspace, loss_workspace, wide_workspace
from megatron_lite.parallel import products
from megatron_lite.parallel import wide_products as kernels
from megatron_lite.recompute.phase import is_recomputing
from tests.description import test_workspace
from tests.parallel import test_wide_products
from tests.support.mutants import Mutant, assert_seen, parameters, replaces
from tests.support.sixteen_bits import multiplies_16_bits


@replaces("widens", products)
def a_replay_takes_torchs_products(widens, x, onednn):
    return widens(x, onednn) and not is_recomputing()


@replaces("_cast", kernels)
def a_block_is_read_in_the_order_of_its_shape(cast, x, memory):
    return memory[: x.numel()].view(x.shape).copy_(x.t().reshape(x.shape))


@replaces("wide_bytes", wide_workspace)
def the_workspace_forgets_the_product(wide_bytes, m, n, k, *, bias=False):
    left, right, _, added = wide_bytes(m, n, k, bias=bias)
    return left, right, 0, added


@replaces("_logits", loss_workspace)
def a_shorter_chunk_has_the_logits_of_a_whole_one(_, sizes, chunks, columns, width):
    return chunks[0] * columns * sizes.element_bytes, [0] * len(chunks)


@replaces("WIDE_BYTES", core_attention_workspace)
def the_workspace_of_attention_has_16_bits(_):
    return 2


MUTANTS = [
    Mutant(
        a_replay_takes_torchs_products,
        test_wide_products.test_a_replay_goes_the_way_of_the_forward,
        dict(policy="*:full", replayed=9),
    ),
    Mutant(
        a_block_is_read_in_the_order_of_its_shape,
        test_wide_products.test_a_product_is_the_exact_one_rounded_once,
        dict(m=9, n=19, k=40, dtype=torch.bfloat16),
    ),
    Mutant(
        the_workspace_forgets_the_product,
        test_wide_products.test_the_peak_of_a_real_step_is_the_predicted_one,
        dict(flags="--bf16", chunks=""),
    ),
    Mutant(
        a_shorter_chunk_has_the_logits_of_a_whole_one,
        test_wide_products.test_a_shorter_last_chunk_of_the_loss_holds_less,
    ),
    Mutant(
        the_workspace_of_attention_has_16_bits,
        test_workspace.test_attention_by_products_holds_what_the_workspace_tells,
        dict(fast=False),
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplies_16_bits(monkeypatch, False)
    assert_seen(mutant, monkeypatch)
