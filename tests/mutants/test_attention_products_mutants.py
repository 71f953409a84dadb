"""Mistakes in bf16 attention by products, each put back: a named test must fail."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.description import attention_products, core_attention_workspace
from megatron_lite.description.operations import course
from megatron_lite.model import causal_products, core_attention
from megatron_lite.recompute import ops
from megatron_lite.recompute.phase import is_recomputing
from tests.description import test_workspace
from tests.model import test_causal_products
from tests.support.changes import with_fields
from tests.support.mutants import Mutant, assert_seen, parameters, replaces
from tests.support.sixteen_bits import multiplies_16_bits

Patch = pytest.MonkeyPatch


@replaces("scores", causal_products._BlockMemory)
def later_keys_are_read(scores, memory, queries, keys, scale, rows):
    return scores(memory, queries, keys, scale, rows).nan_to_num_(neginf=0.0)


def the_sums_of_a_part_go_on_from_those_before(patch: Patch) -> None:
    @replaces("zero_", torch.Tensor)
    def left_as_they_are(zero_, x):
        return x if x.dtype == torch.float32 else zero_(x)

    replaces("TILE_ELEMENTS", attention_products)(lambda _: 1)(patch)
    left_as_they_are(patch)


@replaces("by_head", causal_products._HeadPart)
def the_heads_of_a_group_change_places(by_head, part, x):
    return by_head(part, x).flip(1)


@replaces("weighted_rows", causal_products._BlockMemory)
def rows_are_weighted_twice(weighted_rows, memory, tile, keys):
    return weighted_rows(memory, tile, keys).mul_(2.0)


@replaces("of_keys", causal_products._HeadPart)
def every_part_reads_the_first_sample(of_keys, part, x):
    return of_keys(with_fields(part, sample=0), x)


@replaces("way_of_causal_attention", core_attention)
def a_replay_takes_torchs_kernel(way, query, *, onednn):
    return way(query, onednn=onednn and not is_recomputing())


@replaces("STAND_INS", ops)
def a_policy_does_not_know_the_operator(_):
    return {}


@replaces("backward_bytes", attention_products.PartShape)
def the_memory_of_the_second_tile_is_not_counted(backward_bytes, shape, element_bytes):
    return backward_bytes(shape, element_bytes) - 4 * shape.tile


@replaces("_by_products", core_attention_workspace)
def a_backward_leaves_the_output_behind(workspace, model, sizes, log_sum_exp, freed):
    whole = workspace(model, sizes, log_sum_exp, freed)
    output = core_attention_workspace.Heads.of(model, sizes).query
    return whole._replace(backward=course(whole.backward, +output))


FORMULA = test_causal_products.test_it_is_as_near_to_the_formula_as_torchs_kernel
MUTANTS = [
    *(
        Mutant(fault, FORMULA, dict(groups=2, size=1, joined=True))
        for fault in (
            later_keys_are_read,
            the_sums_of_a_part_go_on_from_those_before,
            the_heads_of_a_group_change_places,
            rows_are_weighted_twice,
            every_part_reads_the_first_sample,
        )
    ),
    Mutant(
        a_replay_takes_torchs_kernel,
        test_causal_products.test_every_policy_gives_the_same_bits,
        error="for backward, the replay",  # the engine compares what a replay saves
    ),
    Mutant(
        a_policy_does_not_know_the_operator,
        test_causal_products.test_a_policy_keeps_the_result_of_the_operator,
    ),
    Mutant(
        the_memory_of_the_second_tile_is_not_counted,
        test_causal_products.test_it_takes_exactly_the_predicted_memory,
        dict(groups=2, seq_length=128, fast=True),
    ),
    Mutant(
        a_backward_leaves_the_output_behind,
        test_workspace.test_attention_by_products_holds_what_the_workspace_tells,
        dict(fast=True),
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplies_16_bits(monkeypatch, True)
    assert_seen(mutant, monkeypatch)
