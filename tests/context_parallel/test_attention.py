"""Attention over context-parallel ranks, alone, against the softmax formula on whole sequences in
float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.context_parallel.sharded_attention import context_parallel_attention
from megatron_lite.parallel.sequence_spans import ContextParallel, select
from tests.support.models import tp_state
from tests.support.ranks import run_ranks

S, B, HEADS, D, SCALE = 24, 2, 4, 6, 0.6


class Results(NamedTuple):
    """Of this rank's tokens, each [s/c, b, heads, d]."""

    output: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


def inputs(groups, *, size=2.0):
    """query, key, value and the output's gradient, whole, in float64. size: the softmax rows are
    far from even."""
    generator = torch.Generator().manual_seed(5)
    return [
        size * torch.randn((S, B, heads, D), dtype=torch.float64, generator=generator)
        for heads in (HEADS, groups, groups, HEADS)
    ]


def formula(query, key, value, grad):
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    repeats = HEADS // key.shape[2]
    keys, values = (leaf.repeat_interleave(repeats, 2) for leaf in leaves[1:])
    scores = torch.einsum("ibhd,jbhd->bhij", leaves[0], keys) * SCALE
    scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    output = torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), values)
    return Results(output.detach(), *torch.autograd.grad(output, leaves, grad))


def place_of(parallel, comm_type):
    return ContextParallel(
        group=parallel.cp_group, rank=parallel.cp_rank, size=parallel.cp_size, comm_type=comm_type
    )


def of_rank(tensors, cp):
    return [select(tensor, cp.spans(S // cp.size), 0) for tensor in tensors]


def rows_of_different_sizes(rank, world_size):
    """Scores of 1e3: exp of one overflows, and one part outweighs the others by any factor."""
    with tp_state(1, cp_size=world_size) as parallel:
        cp = place_of(parallel, "p2p")
        query, key, value, grad = inputs(2, size=20.0)
        leaves = [part.requires_grad_() for part in of_rank([query, key, value], cp)]
        output = context_parallel_attention(*leaves, cp=cp, scale=SCALE)
        results = Results(
            output.detach(), *torch.autograd.grad(output, leaves, of_rank([grad], cp))
        )
        expected = of_rank(formula(query, key, value, grad), cp)
    return [
        torch.allclose(have, want, rtol=1e-9, atol=1e-9)
        for have, want in zip(results, expected, strict=True)
    ]


def test_large_scores_neither_overflow_nor_lose_a_part():
    assert run_ranks(rows_of_different_sizes, 4) == [[True] * 4] * 4
