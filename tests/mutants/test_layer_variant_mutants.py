"""Mistakes in the variants of a layer, each put in: a named test must fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lite.model import embedding, norm
from megatron_lite.model.layer import TransformerLayer
from tests.model import test_layer_variants
from tests.recompute import test_layer_variants as test_recompute
from tests.support.mutants import Mutant, assert_seen, parameters, replaces

Patch = pytest.MonkeyPatch


@replaces("all_reduce", norm)
def each_rank_normalises_its_own_heads(real: Any, tensor: Any, group: Any) -> Any:
    return real(tensor, group) / (1 if group is None else group.size())


@replaces("_mlp", TransformerLayer)
def a_replay_leaves_out_the_matmul_before_a_norm(
    real: Any, self: TransformerLayer, hidden_states: Any, regions: Any, skip_tail: bool
) -> Any:
    if self.post_mlp_layernorm is None:
        return real(self, hidden_states, regions, skip_tail)
    return self.post_mlp_layernorm(self.mlp(hidden_states, regions, skip_tail))


@replaces("residual_dtype", embedding)
def the_residual_stream_has_the_dtype_of_the_weights(_: Any, config: Any, context: Any) -> Any:
    return context.params_dtype


FORMULA = test_layer_variants.test_a_norm_over_all_heads_is_the_formula_on_any_number_of_ranks
BITS = test_recompute.test_gradients_are_unchanged_to_the_bit
ONE = dict(tp_size=1, sequence_parallel=False, precision=torch.bfloat16, every=False)


MUTANTS = [
    Mutant(each_rank_normalises_its_own_heads, FORMULA, dict(world_size=2)),
    Mutant(a_replay_leaves_out_the_matmul_before_a_norm, BITS, ONE, long=True),
    Mutant(
        the_residual_stream_has_the_dtype_of_the_weights,
        test_layer_variants.test_a_float32_residual_stream_is_the_exact_sum_of_its_branches,
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_seen(mutant, monkeypatch)
