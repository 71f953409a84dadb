"""Known tensor-parallel mistakes, each put back into the product: the comparisons of the other
tests must see it.

The fault is made inside the forked ranks, so it cannot leak. A mutant that survives means that a
test has gone blind.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from megatron_lite.model import attention, core_attention, embedding, gpt, mlp, norm
from megatron_lite.optim import grad_buffer
from megatron_lite.optim import grad_norms as norms
from megatron_lite.parallel.collectives import Started, all_reduce
from megatron_lite.parallel.rng import DEFAULT, TENSOR_PARALLEL
from megatron_lite.tensor_parallel import column_linear, cross_entropy, layers, row_linear
from megatron_lite.tensor_parallel.rank_context import RankContext
from tests.support.dropout_masks import mask_faults, masks_of_one_forward
from tests.support.equality import differences, gradients, train, unsharded_gradients
from tests.support.models import tp_state
from tests.support.mutants import replaces
from tests.support.ranks import run_ranks


@replaces("start_all_reduce_", column_linear)
def f_without_all_reduce(_, tensor, group):
    return Started(tensor, None)


@replaces("backward", row_linear._RowParallelMatmul)
def g_with_all_reduce_in_backward(backward, ctx, grad):
    return backward(ctx, all_reduce(grad, ctx.tp_group))


@replaces("row_parallel_linear", layers)
def row_bias_before_the_sum(linear, hidden_states, weight, bias, *, tp_group, **facts):
    """Every rank adds it."""
    return linear(hidden_states, weight, None, tp_group=tp_group, **facts) + tp_group.size() * bias


@replaces("start_reduce_scatter_first_dim", column_linear)
def sequence_gather_with_a_slice_backward(_, tensor, group):
    return Started(tensor.chunk(group.size())[group.rank()], None)


@replaces("all_gather_first_dim", row_linear)
def sequence_reduce_scatter_with_a_slice_backward(_, shard, group):
    """The gradient of other ranks' tokens is left out."""
    whole = shard.new_zeros(shard.shape[0] * group.size(), *shard.shape[1:])
    whole.chunk(group.size())[group.rank()].copy_(shard)
    return whole


@replaces("forward", embedding.PositionEmbedding)
def positions_from_zero_on_every_rank(forward, self, start, length):
    return forward(self, 0, length)


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


@replaces("__init__", layers.RowParallelLinear)
def row_bias_gradients_not_summed(*args, **kwargs):
    _not_summed_over_tp(*args, **kwargs)


@replaces("__init__", embedding.PositionEmbedding)
def position_gradients_not_summed(*args, **kwargs):
    _not_summed_over_tp(*args, **kwargs)


@replaces("Norm", attention)
def qk_layernorm_gradients_as_under_no_tensor_parallelism(
    real, size, config, context, *, partial_grad
):
    """Taken for replicated, as the layer norms are without sequence parallelism."""
    return real(size, config, context, partial_grad=False)


@replaces("spec_of", grad_buffer)
def replicated_gradients_summed(spec_of, parameter):
    """Everything that is not sharded is summed, though each rank already has all of it."""
    spec = spec_of(parameter)
    return dataclasses.replace(spec, sum_grad_over_tp=spec.tp_dim is None)


@replaces("spec_of", grad_buffer)
def sharded_gradients_summed(spec_of, parameter):
    return dataclasses.replace(spec_of(parameter), sum_grad_over_tp=True)


@replaces("vocab_parallel_cross_entropy", gpt)
def loss_with_padding_columns(real, logits, labels, **facts):
    return real(logits, labels, **{**facts, "num_ids": logits.shape[-1]})


@replaces("all_reduce_", cross_entropy)
def loss_with_a_local_maximum_and_no_exchange(_, tensor, group, op=dist.ReduceOp.SUM):
    """The softmax is taken over this rank's columns only."""
    return tensor


@replaces("ColumnParallelLinear", mlp)
def swiglu_sharded_contiguously(linear, *args, tp_blocks=1, **kwargs):
    """Rank 0 gets all of the gate and rank 1 all of the up projection."""
    return linear(*args, tp_blocks=1, **kwargs)


@replaces("forward", layers.VocabParallelEmbedding)
def embedding_without_mask(_, self, tokens):
    """Ids of other ranks' rows look up row 0 of this rank."""
    rows = self.weight.shape[0]
    local = tokens.t() - self.context.rank * rows
    local = local.masked_fill((local < 0) | (local >= rows), 0)
    return layers.leave_row_parallel(
        torch.nn.functional.embedding(local, self.weight), self.context
    )


# fault, variant of the model, sequence parallel, names that must differ (by part of the name)
GRADIENT_MUTANTS = [
    (f_without_all_reduce, "gpt2", False, ("word_embeddings", "input_layernorm")),
    (g_with_all_reduce_in_backward, "gpt2", False, ("linear_fc2.weight", "linear_proj.weight")),
    (row_bias_before_the_sum, "gpt2", False, ("loss",)),
    (row_bias_before_the_sum, "gpt2", True, ("loss",)),
    (sequence_gather_with_a_slice_backward, "llama", True, ("word_embeddings", "input_layernorm")),
    (
        sequence_reduce_scatter_with_a_slice_backward,
        "llama",
        True,
        ("linear_fc2.weight", "linear_proj.weight"),
    ),
    (positions_from_zero_on_every_rank, "gpt2", True, ("loss", "position_embeddings")),
    (
        norm_gradients_not_summed,
        "llama",
        True,
        ("input_layernorm", "pre_mlp_layernorm", "final_layernorm"),
    ),
    (row_bias_gradients_not_summed, "gpt2", True, ("linear_fc2.bias", "linear_proj.bias")),
    (position_gradients_not_summed, "gpt2", True, ("position_embeddings.weight",)),
    (
        qk_layernorm_gradients_as_under_no_tensor_parallelism,
        "neox",
        False,
        ("q_layernorm.weight", "k_layernorm.bias"),
    ),
    (
        qk_layernorm_gradients_as_under_no_tensor_parallelism,
        "qwen",
        True,
        ("q_layernorm.weight", "k_layernorm.weight"),
    ),
    (
        replicated_gradients_summed,
        "gpt2",
        False,
        ("linear_proj.bias", "input_layernorm.weight", "position_embeddings"),
    ),
    (
        sharded_gradients_summed,
        "gpt2",
        True,
        ("linear_qkv.weight", "linear_fc2.weight", "word_embeddings"),
    ),
    (loss_with_padding_columns, "gpt2", False, ("loss", "word_embeddings")),
    (loss_with_a_local_maximum_and_no_exchange, "gpt2", False, ("loss",)),
    (swiglu_sharded_contiguously, "llama", False, ("loss", "linear_fc1")),
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


@replaces("all_reduce_", norms)
def norm_is_local(_, tensor, group):
    return tensor


@pytest.mark.parametrize(
    "fault", [norm_counts_duplicates_on_every_rank, norm_is_local], ids=lambda fault: fault.__name__
)
def test_training_equality_sees(fault):
    def work(rank, world_size):
        fault(pytest.MonkeyPatch())
        with tp_state(2) as parallel:
            return train("gpt2", parallel, steps=1)

    with tp_state(1) as parallel:
        expected = train("gpt2", parallel, steps=1)
    assert abs(run_ranks(work, 2)[0].grad_norms[0] / expected.grad_norms[0] - 1.0) > 1e-3


@replaces("residual_stream", RankContext)
def residual_masks_differ_over_ranks(_, self):
    return TENSOR_PARALLEL


@replaces("residual_stream", RankContext)
def residual_masks_are_shared_by_ranks(_, self):
    return DEFAULT


@replaces("TENSOR_PARALLEL", core_attention)
def attention_masks_are_shared_by_ranks(_):
    return DEFAULT


@pytest.mark.parametrize(
    "fault, sequence_parallel, expected",
    [
        (residual_masks_differ_over_ranks, False, {"residual"}),
        (residual_masks_are_shared_by_ranks, True, {"residual"}),
        (attention_masks_are_shared_by_ranks, False, {"attention"}),
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
