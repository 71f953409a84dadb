"""The kernels under attention over context-parallel ranks, on any device: all ranks in one process,
their exchange in memory."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from megatron_lite.context_parallel.attention_kernels import has_kernel
from megatron_lite.context_parallel.sharded_attention import EXCHANGES, context_parallel_attention
from megatron_lite.parallel.sequence_spans import select, spans_of
from tests.gpu.test_gpu_long_sequences import HEADS, SCALE, S, inputs
from tests.support.documents import attended_alone

SIZE = 3
CASES = (1, torch.float32, 1e-5), (1, torch.bfloat16, 2e-2), (20, torch.float32, 1e-3)


@dataclass
class InMemory:
    """Stands for the group of one rank. parts: of all ranks, which `totals` get the gradients
    of."""

    own: int
    parts: list[Tensor]
    totals: list[Tensor] = field(default_factory=list)

    def rank(self):
        return self.own

    def size(self):
        return len(self.parts)


def parts_in_memory(own, group):
    for step in range(group.size()):
        source = (group.rank() - step) % group.size()
        yield source, group.parts[source]


def sum_in_memory(own, group, gradients):
    for source, tokens, key, value in gradients:
        group.totals[source][0, tokens] += key
        group.totals[source][1, tokens] += value
    return torch.zeros_like(group.totals[group.rank()])  # not complete yet: other ranks follow


@contextmanager
def memory_as_an_exchange():
    EXCHANGES["memory"] = parts_in_memory, sum_in_memory
    try:
        yield
    finally:
        del EXCHANGES["memory"]


def over_ranks(whole):
    """Output, and the gradients of query, key and value, in the order of the ranks' tokens."""
    spans = [spans_of(S, rank=rank, size=SIZE) for rank in range(SIZE)]
    shards = [[select(tensor, of_rank, 0) for tensor in whole] for of_rank in spans]
    parts = [torch.stack((key, value)) for _, key, value, _ in shards]
    totals = [torch.zeros_like(part, dtype=torch.float32) for part in parts]
    found = []
    with memory_as_an_exchange():
        for rank, (query, key, value, grad) in enumerate(shards):
            group = InMemory(rank, parts, totals)
            query.requires_grad_()
            output = context_parallel_attention(
                query,
                key.requires_grad_(),
                value.requires_grad_(),
                group=group,
                comm_type="memory",
                scale=SCALE,
            )
            output.backward(grad)
            assert query.grad is not None
            found.append((output.detach(), query.grad, *totals[rank]))
    return [torch.cat(tensors) for tensors in zip(*found, strict=True)]


def alone(whole):
    """The same by the formula, in float64 on the CPU."""
    spans = [span for rank in range(SIZE) for span in spans_of(S, rank=rank, size=SIZE)]
    exact = attended_alone(*whole, (0, S, 2 * S), reach=None, scale=SCALE)
    return [select(tensor, spans, 0) for tensor in exact]


def test_attention_over_three_ranks_is_that_of_one(device):
    """float32: a few times 1e-7. bf16 rounds at 4e-3 what goes in, each part of the output, and the
    output. Values of size 20 have scores of 1e3, which float32 rounds at 1e-4: exp of one
    overflows, and one part outweighs the others by any factor."""
    for groups, (size, dtype, tolerance) in product((HEADS, 2), CASES):
        exact = [size * each for each in inputs(groups)]
        whole = [tensor.to(device, dtype) for tensor in exact]
        assert has_kernel(whole[0])
        for name, ours, right in zip(
            ("output", "query", "key", "value"), over_ranks(whole), alone(exact), strict=True
        ):
            error = (ours.cpu().double() - right).norm() / right.norm()
            assert error < tolerance, (name, groups, size, dtype, error)
