"""Column- and row-parallel linear layers and the embedding, each against torch's dense one with the
whole weights."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.parallel.parameter_spec import spec_of
from megatron_lite.parallel.weight_gradient import accumulate_lookups_
from megatron_lite.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    token_rows,
)
from megatron_lite.tensor_parallel.rank_context import RankContext
from tests.support.models import tp_state, whole_tensor
from tests.support.ranks import run_ranks
from tests.support.torch_features import NEEDS_GRAD_DTYPE

S, B, INPUT, OUTPUT = 8, 3, 20, 12  # every one divisible by 4, no two alike
VOCAB, PADDED = 10, 16  # at TP 4 the third rank holds 2 true rows and the last none
LAYOUTS = pytest.mark.parametrize(
    "tp_size, sequence_parallel", [(1, False), (2, False), (2, True), (4, True)]
)


def draw(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@contextmanager
def tp_context(tp_size, *, sequence_parallel):
    with tp_state(tp_size) as parallel:
        yield (
            parallel,
            RankContext.of(
                parallel, sequence_parallel=sequence_parallel, params_dtype=torch.float64
            ),
        )


@torch.no_grad()
def set_whole_(parameter, whole, context):
    """Gives the parameter this rank's part of the whole tensor, written out here by chunks, not by
    the product's spans."""
    spec = spec_of(parameter)
    if spec.tp_dim is None:
        parameter.copy_(whole)
        return
    padding = [0] * (2 * whole.dim())
    padding[-1 - 2 * spec.tp_dim] = (spec.padded_length or whole.shape[spec.tp_dim]) - whole.shape[
        spec.tp_dim
    ]
    blocks = F.pad(whole, padding).chunk(spec.tp_blocks, dim=spec.tp_dim)
    parameter.copy_(
        torch.cat(
            [block.chunk(context.size, dim=spec.tp_dim)[context.rank] for block in blocks],
            dim=spec.tp_dim,
        )
    )


def run(work, tp_size):
    return run_ranks(work, tp_size) if tp_size > 1 else [work(0, 1)]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


def parts(tensor, tp_size, blocks, dim):
    """The part of each rank, of every block."""
    cut = [block.chunk(tp_size, dim) for block in tensor.chunk(blocks, dim)]
    return [torch.cat(of_rank, dim) for of_rank in zip(*cut, strict=True)]


@pytest.mark.runs(daily=4, ci=8)
@pytest.mark.parametrize("kind", ["column", "column of three blocks", "row"])
@LAYOUTS
def test_parallel_linear_layers_equal_the_dense_one(tp_size, sequence_parallel, kind):
    blocks = 3 if "three" in kind else 1
    x, weight, bias = (
        draw(S, B, INPUT, seed=1),
        draw(OUTPUT * blocks, INPUT, seed=2),
        draw(OUTPUT * blocks, seed=3),
    )
    grad = draw(S, B, OUTPUT * blocks, seed=4)

    def tokens(tensor):
        return parts(tensor, tp_size, 1, 0) if sequence_parallel else [tensor] * tp_size

    def features(tensor):
        return parts(tensor, tp_size, blocks, -1)

    before, after = (features, tokens) if kind == "row" else (tokens, features)

    def work(rank, world_size):
        with tp_context(tp_size, sequence_parallel=sequence_parallel) as (parallel, context):
            options = dict(bias=True, init_std=0.0, context=context)
            layer = (
                RowParallelLinear(INPUT, OUTPUT, **options)
                if kind == "row"
                else ColumnParallelLinear(INPUT, OUTPUT * blocks, tp_blocks=blocks, **options)
            )
            set_whole_(layer.weight, weight, context)
            set_whole_(layer.bias, bias, context)
            mine = before(x)[rank].clone().requires_grad_()
            output = layer(mine)
            output.backward(after(grad)[rank])
            return (
                output.detach(),
                mine.grad,
                *(whole_tensor(one.grad, one, parallel) for one in (layer.weight, layer.bias)),
            )

    dense = [t.clone().requires_grad_() for t in (x, weight, bias)]
    expected = F.linear(*dense)
    expected.backward(grad)
    results = run(work, tp_size)
    for rank, (output, grad_x, grad_weight, _) in enumerate(results):
        close(output, after(expected.detach())[rank])
        close(grad_x, before(dense[0].grad)[rank])
        close(grad_weight, dense[1].grad)
    of_ranks = [grad_bias for *_, grad_bias in results]
    if kind == "row" and sequence_parallel:
        # each rank has added the bias to its own tokens: marked sum_grad_over_tp
        of_ranks = [sum(of_ranks)]
    for grad_bias in of_ranks:
        close(grad_bias, dense[2].grad)


@pytest.mark.runs(daily=2, ci=4)
@LAYOUTS
def test_the_embedding_equals_the_dense_one(tp_size, sequence_parallel):
    # [b, s]; every id, each at least twice
    tokens = torch.arange(B * S).remainder(VOCAB).view(B, S)
    weight, grad = draw(VOCAB, INPUT, seed=2), draw(S, B, INPUT, seed=4)

    def tokens_of(tensor, rank):
        return tensor.chunk(tp_size)[rank] if sequence_parallel else tensor

    def work(rank, world_size):
        with tp_context(tp_size, sequence_parallel=sequence_parallel) as (parallel, context):
            layer = VocabParallelEmbedding(
                VOCAB, INPUT, padded_vocab_size=PADDED, init_std=0.0, context=context
            )
            set_whole_(layer.weight, weight, context)
            output = layer(tokens)
            output.backward(tokens_of(grad, rank))
            rows = spec_of(layer.weight).spans(rank, tp_size)
            padding = layer.weight.grad[rows[0].length if rows else 0 :]
            return output.detach(), whole_tensor(layer.weight.grad, layer.weight, parallel), padding

    dense = weight.clone().requires_grad_()
    expected = F.embedding(tokens.t(), dense)
    expected.backward(grad)
    for rank, (output, grad_weight, grad_padding) in enumerate(run(work, tp_size)):
        # one rank's value plus zeros: exact
        assert torch.equal(output, tokens_of(expected.detach(), rank))
        close(grad_weight, dense.grad)
        assert not grad_padding.any()


ROWS, WIDTH = 11, 6
BATCHES = (torch.tensor([[3, 0, 3], [10, 3, 1]]), torch.tensor([[0, 0, 9], [2, 3, 2]]))


def table(dtype: torch.dtype) -> nn.Parameter:
    weight = nn.Parameter(torch.randn(ROWS, WIDTH).to(dtype))
    if dtype != torch.float32:
        weight.grad_dtype = torch.float32  # type: ignore[attr-defined]
    return weight


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NEEDS_GRAD_DTYPE)]
)
def test_gradients_of_lookups_are_added_to_the_sum_of_a_step(dtype: torch.dtype) -> None:
    weight = table(dtype)
    total = torch.full((ROWS, WIDTH), torch.nan)  # what an earlier step left
    accumulate_lookups_([(weight, total)])
    grads = [torch.randn(*tokens.shape, WIDTH).to(dtype) for tokens in BATCHES]
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for tokens, grad in zip(BATCHES, grads, strict=True):
        output = token_rows(tokens, weight)
        assert torch.equal(output, weight[tokens])
        output.backward(grad)
        expected.index_put_((tokens,), grad.double(), accumulate=True)
    assert weight.grad is total
    # sums of at most seven float32 numbers near 1
    assert torch.allclose(total.double(), expected, rtol=0, atol=1e-6)
