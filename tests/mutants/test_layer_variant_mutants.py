"""Mistakes in the variants of a layer, each put in: a named test must fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lite.model import embedding, layer, norm
from megatron_lite.model.layer import TransformerLayer
from tests.model import test_layer_variants, test_transformers_parity
from tests.recompute import test_layer_variants as test_recompute
from tests.support.mutants import Mutant, assert_seen, parameters, replaces

Patch = pytest.MonkeyPatch


@replaces("all_reduce", norm)
def each_rank_normalises_its_own_heads(real: Any, tensor: Any, group: Any) -> Any:
    return real(tensor, group) / (1 if group is None else group.size())


def backward_sums_over_the_heads_of_one_rank(patch: Patch) -> None:
    calls = []

    @replaces("all_reduce", norm)
    def first_only(real: Any, tensor: Any, group: Any) -> Any:
        calls.append(tensor)
        return real(tensor, group) if len(calls) == 1 else tensor

    first_only(patch)


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


@replaces("__init__", TransformerLayer)
def the_mlp_reads_the_sum_with_attention(real: Any, self: TransformerLayer, *args: Any) -> None:
    real(self, *args)
    self.parallel_residual = False


@replaces("_before", layer)
def norms_come_before_too(real: Any, norm: Any, hidden_states: Any, regions: Any) -> Any:
    return real(norm, hidden_states, regions) * 1.5


FORMULA = test_layer_variants.test_a_norm_over_all_heads_is_the_formula_on_any_number_of_ranks
PEER = test_transformers_parity.test_logits_loss_and_gradients_equal_those_of_transformers
BITS = test_recompute.test_gradients_are_unchanged_to_the_bit
ONE = dict(tp_size=1, sequence_parallel=False, precision=torch.bfloat16, every=False)


def peer(fault: Any, name: str) -> Mutant:
    return Mutant(fault, PEER, dict(name=name, dtype=torch.float32, tolerance=1e-5))


MUTANTS = [
    Mutant(each_rank_normalises_its_own_heads, FORMULA, dict(world_size=2)),
    Mutant(backward_sums_over_the_heads_of_one_rank, FORMULA, dict(world_size=2)),
    Mutant(a_replay_leaves_out_the_matmul_before_a_norm, BITS, ONE, long=True),
    Mutant(
        the_residual_stream_has_the_dtype_of_the_weights,
        test_layer_variants.test_a_float32_residual_stream_is_the_exact_sum_of_its_branches,
    ),
    peer(the_mlp_reads_the_sum_with_attention, "gpt_neox with a parallel residual"),
    peer(norms_come_before_too, "olmo2"),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_seen(mutant, monkeypatch)
