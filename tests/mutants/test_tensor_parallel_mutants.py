"""Known tensor-parallel mistakes, each put back into the product: the comparisons of the other
tests must see it.

The fault is made inside the forked ranks, so it cannot leak. A mutant that survives means that a
test has gone blind.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_lite.model import norm
from megatron_lite.optim import optimizer as norms
from megatron_lite.parallel.collectives import Started
from megatron_lite.parallel.rng import TENSOR_PARALLEL
from megatron_lite.tensor_parallel import layers
from megatron_lite.tensor_parallel.rank_context import RankContext
from tests.support.dropout_masks import mask_faults, masks_of_one_forward
from tests.support.equality import differences, gradients, train, unsharded_gradients
from tests.support.models import tp_state
from tests.support.mutants import replaces
from tests.support.ranks import run_ranks


@replaces("start_all_reduce_", layers)
def f_without_all_reduce(_, tensor, group):
    return Started(tensor, None)


@replaces("start_reduce_scatter_first_dim", layers)
def sequence_gather_with_a_slice_backward(_, tensor, group):
    return Started(tensor.chunk(group.size())[group.rank()], None)


def _not_summed_over_tp(init, self, *args, **kwargs) -> None:
    """Every parameter made by the class forgets that its gradient is partial."""
    init(self, *args, **kwargs)
    for parameter in self.parameters(recurse=False):
        parameter.parameter_spec = dataclasses.replace(
            parameter.parameter_spec, sum_grad_over_tp=False
        )


@replaces("__init__", norm.Norm)
def norm_gradients_not_summed(*args, **kwargs):
    _not_summed_over_tp(*args, **kwargs)


@replaces("forward", layers.VocabParallelEmbedding)
def embedding_without_mask(_, self, tokens):
    """Ids of other ranks' rows look up row 0 of this rank."""
    rows = self.weight.shape[0]
    local = tokens.t() - self.context.rank * rows
    local = local.masked_fill((local < 0) | (local >= rows), 0)
    partial = torch.nn.functional.embedding(local, self.weight)
    return layers.reduce_from_tensor_parallel_region(partial, self.context.group)


# fault, variant of the model, sequence parallel, names that must differ (by part of the name)
GRADIENT_MUTANTS = [
    (f_without_all_reduce, "gpt2", False, ("word_embeddings", "input_layernorm")),
    (sequence_gather_with_a_slice_backward, "llama", True, ("word_embeddings", "input_layernorm")),
    (
        norm_gradients_not_summed,
        "llama",
        True,
        ("input_layernorm", "pre_mlp_layernorm", "final_layernorm"),
    ),
    (embedding_without_mask, "llama", False, ("loss", "word_embeddings")),
]


@pytest.mark.parametrize(
    "fault, name, sequence_parallel, seen_in",
    GRADIENT_MUTANTS,
    ids=[f"{mutant[0].__name__}-{mutant[1]}" for mutant in GRADIENT_MUTANTS],
)
def test_gradient_equality_sees(fault, name, sequence_parallel, seen_in):
    def work(rank, world_size):
        fault(pytest.MonkeyPatch())
        with tp_state(2) as parallel:
            return gradients(name, parallel, sequence_parallel=sequence_parallel)

    errors = differences(unsharded_gradients(name), run_ranks(work, 2)[0])
    for part in seen_in:
        assert max(error for key, error in errors.items() if part in key) > 1e-3, part


@replaces("__init__", norms.Optimizer)
def norm_counts_duplicates_on_every_rank(init, self, *args, **kwargs):
    init(self, *args, **kwargs)
    self._counts_here = [True] * len(self._counts_here)


def test_training_equality_sees_norms_that_count_duplicates():
    def work(rank, world_size):
        norm_counts_duplicates_on_every_rank(pytest.MonkeyPatch())
        with tp_state(2) as parallel:
            return train("gpt2", parallel, steps=1)

    with tp_state(1) as parallel:
        expected = train("gpt2", parallel, steps=1)
    assert abs(run_ranks(work, 2)[0].grad_norms[0] / expected.grad_norms[0] - 1.0) > 1e-3


@replaces("residual_stream", RankContext)
def residual_masks_differ_over_ranks(_, self):
    return TENSOR_PARALLEL


def test_mask_comparison_sees_masks_that_differ_over_ranks():
    def work(rank, world_size):
        residual_masks_differ_over_ranks(pytest.MonkeyPatch())
        with tp_state(2) as parallel:
            return masks_of_one_forward(parallel, sequence_parallel=False)

    first, second = run_ranks(work, 2)
    # embedding, and per layer attention and MLP; per layer one
    assert len(first.residual) == 5 and len(first.attention) == 2
    assert mask_faults(first, second, sequence_parallel=False) == {"residual"}
