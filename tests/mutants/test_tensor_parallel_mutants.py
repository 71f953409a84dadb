"""Known tensor-parallel mistakes, each put back into the product: the comparisons of the other
tests must see it.

The fault is made inside the forked ranks, so it cannot leak. A mutant that survives means that a
test has gone blind.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_lite.model import attention, core_attention, gpt, norm
from megatron_lite.optim import grad_buffer
from megatron_lite.optim import optimizer as norms
from megatron_lite.parallel.collectives import Started
from megatron_lite.parallel.rng import DEFAULT, TENSOR_PARALLEL
from megatron_lite.tensor_parallel import layers, linear
from megatron_lite.tensor_parallel.rank_context import RankContext
from tests.support.dropout_masks import mask_faults, masks_of_one_forward
from tests.support.equality import differences, gradients, train, unsharded_gradients
from tests.support.models import tp_state
from tests.support.mutants import replaces
from tests.support.ranks import run_ranks


@replaces("start_all_reduce_", linear)
def f_without_all_reduce(_, tensor, group):
    return Started(tensor, None)


@replaces("row_parallel_linear", layers)
def row_bias_before_the_sum(linear, hidden_states, weight, bias, *, tp_group, **facts):
    """Every rank adds it."""
    return linear(hidden_states, weight, None, tp_group=tp_group, **facts) + tp_group.size() * bias


@replaces("start_reduce_scatter_first_dim", linear)
def sequence_gather_with_a_slice_backward(_, tensor, group):
    return Started(tensor.chunk(group.size())[group.rank()], None)


@replaces("all_gather_first_dim", linear)
def sequence_reduce_scatter_with_a_slice_backward(_, shard, group):
    """The gradient of other ranks' tokens is left out."""
    whole = shard.new_zeros(shard.shape[0] * group.size(), *shard.shape[1:])
    whole.chunk(group.size())[group.rank()].copy_(shard)
    return whole


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


@replaces("Norm", attention)
def qk_layernorm_gradients_as_under_no_tensor_parallelism(
    real, size, config, context, *, partial_grad
):
    """Taken for replicated, as the layer norms are without sequence parallelism."""
    return real(size, config, context, partial_grad=False)


@replaces("spec_of", grad_buffer)
def sharded_gradients_summed(spec_of, parameter):
    return dataclasses.replace(spec_of(parameter), sum_grad_over_tp=True)


@replaces("vocab_parallel_cross_entropy", gpt)
def loss_with_padding_columns(real, logits, labels, columns, **facts):
    return real(logits, labels, columns._replace(num_ids=logits.shape[-1]), **facts)


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
    (row_bias_before_the_sum, "gpt2", True, ("loss",)),
    (sequence_gather_with_a_slice_backward, "llama", True, ("word_embeddings", "input_layernorm")),
    (
        sequence_reduce_scatter_with_a_slice_backward,
        "llama",
        True,
        ("linear_fc2.weight", "linear_proj.weight"),
    ),
    (
        norm_gradients_not_summed,
        "llama",
        True,
        ("input_layernorm", "pre_mlp_layernorm", "final_layernorm"),
    ),
    (
        qk_layernorm_gradients_as_under_no_tensor_parallelism,
        "neox",
        False,
        ("q_layernorm.weight", "k_layernorm.bias"),
    ),
    (
        sharded_gradients_summed,
        "gpt2",
        True,
        ("linear_qkv.weight", "linear_fc2.weight", "word_embeddings"),
    ),
    (loss_with_padding_columns, "gpt2", False, ("loss", "word_embeddings")),
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


@replaces("_counts_here", norms)
def norm_counts_duplicates_on_every_rank(_, parameter, parallel):
    return True


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


@replaces("TENSOR_PARALLEL", core_attention)
def attention_masks_are_shared_by_ranks(_):
    return DEFAULT


@pytest.mark.parametrize(
    "fault, sequence_parallel, expected",
    [
        (residual_masks_differ_over_ranks, False, {"residual"}),
        (attention_masks_are_shared_by_ranks, True, {"attention"}),
    ],
)
def test_mask_comparison_sees(fault, sequence_parallel, expected):

    def work(rank, world_size):
        fault(pytest.MonkeyPatch())
        with tp_state(2) as parallel:
            return masks_of_one_forward(parallel, sequence_parallel=sequence_parallel)

    first, second = run_ranks(work, 2)
    # embedding, and per layer attention and MLP; per layer one
    assert len(first.residual) == 5 and len(first.attention) == 2
    assert mask_faults(first, second, sequence_parallel=sequence_parallel) == expected
