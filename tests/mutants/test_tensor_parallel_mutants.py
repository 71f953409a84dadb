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

from megatron_lite.model import attention, embedding, gpt, mlp, norm
from megatron_lite.optim import grad_buffer
from megatron_lite.optim import grad_norms as norms
from megatron_lite.parallel.collectives import Started, all_reduce
from megatron_lite.parallel.rng import DEFAULT, TENSOR_PARALLEL
from megatron_lite.tensor_parallel import column_linear, cross_entropy, layers, row_linear
from megatron_lite.tensor_parallel.rank_context import RankContext
from tests.support.dropout_masks import mask_faults, masks_of_one_forward
from tests.support.equality import differences, gradients, train, unsharded_gradients
from tests.support.models import tp_state
from tests.support.ranks import run_ranks


def f_without_all_reduce() -> None:
    column_linear.start_all_reduce_ = lambda tensor, group: Started(tensor, None)


def g_with_all_reduce_in_backward() -> None:
    backward = row_linear._RowParallelMatmul.backward
    row_linear._RowParallelMatmul.backward = staticmethod(
        lambda ctx, grad: backward(ctx, all_reduce(grad, ctx.tp_group))
    )


def row_bias_before_the_sum() -> None:
    """Every rank adds it."""

    def linear(hidden_states, weight, bias, *, tp_group, **facts):
        return (
            row_linear.row_parallel_linear(hidden_states, weight, None, tp_group=tp_group, **facts)
            + tp_group.size() * bias
        )

    layers.row_parallel_linear = linear


def sequence_gather_with_a_slice_backward() -> None:
    column_linear.start_reduce_scatter_first_dim = lambda tensor, group: Started(
        tensor.chunk(group.size())[group.rank()], None
    )


def sequence_reduce_scatter_with_a_slice_backward() -> None:
    """The gradient of other ranks' tokens is left out."""

    def gather(shard, group):
        whole = shard.new_zeros(shard.shape[0] * group.size(), *shard.shape[1:])
        whole.chunk(group.size())[group.rank()].copy_(shard)
        return whole

    row_linear.all_gather_first_dim = gather


def positions_from_zero_on_every_rank() -> None:
    forward = embedding.PositionEmbedding.forward
    embedding.PositionEmbedding.forward = lambda self, start, length: forward(self, 0, length)


def _without_sum_over_tp(owner: type) -> None:
    """Every parameter made by `owner` forgets that its gradient is partial."""
    init = owner.__init__

    def forgetful(self, *args, **kwargs):
        init(self, *args, **kwargs)
        for parameter in self.parameters(recurse=False):
            parameter.parameter_spec = dataclasses.replace(
                parameter.parameter_spec, sum_grad_over_tp=False
            )

    owner.__init__ = forgetful


def norm_gradients_not_summed() -> None:
    _without_sum_over_tp(norm.Norm)


def row_bias_gradients_not_summed() -> None:
    _without_sum_over_tp(layers.RowParallelLinear)


def position_gradients_not_summed() -> None:
    _without_sum_over_tp(embedding.PositionEmbedding)


def qk_layernorm_gradients_as_under_no_tensor_parallelism() -> None:
    """Taken for replicated, as the layer norms are without sequence parallelism."""

    def whole_grad(size, config, context, *, partial_grad):
        return norm.Norm(size, config, context, partial_grad=False)

    attention.Norm = whole_grad


def replicated_gradients_summed() -> None:
    """Everything that is not sharded is summed, though each rank already has all of it."""
    real = grad_buffer.spec_of
    grad_buffer.spec_of = lambda p: dataclasses.replace(
        real(p), sum_grad_over_tp=real(p).tp_dim is None
    )


def sharded_gradients_summed() -> None:
    real = grad_buffer.spec_of
    grad_buffer.spec_of = lambda p: dataclasses.replace(real(p), sum_grad_over_tp=True)


def loss_with_padding_columns() -> None:
    real = gpt.vocab_parallel_cross_entropy
    gpt.vocab_parallel_cross_entropy = lambda logits, labels, **facts: real(
        logits, labels, **{**facts, "num_ids": logits.shape[-1]}
    )


def loss_with_a_local_maximum_and_no_exchange() -> None:
    """The softmax is taken over this rank's columns only."""
    cross_entropy.all_reduce_ = lambda tensor, group, op=dist.ReduceOp.SUM: tensor


def swiglu_sharded_contiguously() -> None:
    """Rank 0 gets all of the gate and rank 1 all of the up projection."""
    real = mlp.ColumnParallelLinear
    mlp.ColumnParallelLinear = lambda *args, tp_blocks=1, **kwargs: real(
        *args, tp_blocks=1, **kwargs
    )


def embedding_without_mask() -> None:
    """Ids of other ranks' rows look up row 0 of this rank."""

    def forward(self, tokens):
        rows = self.weight.shape[0]
        local = tokens.t() - self.context.rank * rows
        local = local.masked_fill((local < 0) | (local >= rows), 0)
        return layers.leave_row_parallel(
            torch.nn.functional.embedding(local, self.weight), self.context
        )

    layers.VocabParallelEmbedding.forward = forward


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
        fault()
        with tp_state(2) as parallel:
            return gradients(name, parallel, sequence_parallel=sequence_parallel)

    errors = differences(unsharded_gradients(name), run_ranks(work, 2)[0])
    for part in seen_in:
        assert max(error for key, error in errors.items() if part in key) > 1e-3, part


def norm_counts_duplicates_on_every_rank() -> None:
    norms._counts_here = lambda parameter, parallel: True


def norm_is_local() -> None:
    norms.all_reduce_ = lambda tensor, group: tensor


@pytest.mark.parametrize(
    "fault", [norm_counts_duplicates_on_every_rank, norm_is_local], ids=lambda fault: fault.__name__
)
def test_training_equality_sees(fault):
    def work(rank, world_size):
        fault()
        with tp_state(2) as parallel:
            return train("gpt2", parallel, steps=1)

    with tp_state(1) as parallel:
        expected = train("gpt2", parallel, steps=1)
    assert abs(run_ranks(work, 2)[0].grad_norms[0] / expected.grad_norms[0] - 1.0) > 1e-3


def residual_masks_differ_over_ranks() -> None:
    RankContext.residual_stream = property(lambda self: TENSOR_PARALLEL)


def residual_masks_are_shared_by_ranks() -> None:
    RankContext.residual_stream = property(lambda self: DEFAULT)


def attention_masks_are_shared_by_ranks() -> None:
    attention.TENSOR_PARALLEL = DEFAULT


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
        fault()
        with tp_state(2) as parallel:
            return masks_of_one_forward(parallel, sequence_parallel=sequence_parallel)

    first, second = run_ranks(work, 2)
    # embedding, and per layer attention and MLP; per layer one
    assert len(first.residual) == 5 and len(first.attention) == 2
    assert mask_faults(first, second, sequence_parallel=sequence_parallel) == expected
