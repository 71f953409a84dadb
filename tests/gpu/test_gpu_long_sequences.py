"""Packed documents and an MLP in tiles, on any device: against formulas in float64 on the CPU."""

from itertools import pairwise

import torch

from megatron_lite.context_parallel.attention_kernels import CuSeqlens, Readable
from megatron_lite.model.attention import masked_attention

S, B, HEADS, D, SCALE = 96, 2, 4, 64, 0.125
BOUNDS = (0, 1, 40, 96, 160, 192)
REACH = 16


def draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def inputs(groups):
    """query, key, value and the output's gradient, [s, b, a, d]."""
    sizes = (HEADS, groups, groups, HEADS)
    return [draw(S, B, heads, D, seed=seed) for seed, heads in enumerate(sizes)]


def by_formula(whole, reach, bounds=BOUNDS):
    """The output, and the gradients of query, key and value, of each document alone."""
    query, key, value = (tensor.clone().requires_grad_() for tensor in whole[:3])
    keys, values = (each.repeat_interleave(HEADS // each.shape[2], 2) for each in (key, value))
    output = torch.zeros_like(query)
    for start, stop in pairwise(bounds):
        sample, rows = start // S, slice(start % S, (stop - 1) % S + 1)
        scores = torch.einsum("iad,jad->aij", query[rows, sample], keys[rows, sample]) * SCALE
        places = torch.arange(stop - start)
        distance = places.unsqueeze(1) - places
        hidden = (distance < 0) | (distance > (stop if reach is None else reach))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        output[rows, sample] = torch.einsum("aij,jad->iad", weights, values[rows, sample])
    return [output, *torch.autograd.grad(output, (query, key, value), whole[3])]


def test_documents_are_attended_alone(device):
    """float32: a few times 1e-7, on a GPU 2e-5. bf16 rounds at 4e-3 what goes in and the output,
    which the sums of a query's gradient show most. A key of another document would change all by
    some tenths."""
    documents = CuSeqlens.of(BOUNDS, batch=B, seq_length=S, device=device)
    for groups, reach in ((HEADS, None), (2, None), (2, REACH)):
        expected = by_formula(inputs(groups), reach)
        for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
            *whole, grad = (tensor.to(device, dtype) for tensor in inputs(groups))
            whole = [tensor.requires_grad_() for tensor in whole]
            output = masked_attention(*whole, Readable(reach, documents), scale=SCALE)
            found = [output, *torch.autograd.grad(output, whole, grad)]
            for name, ours, exact in zip(
                ("output", "query", "key", "value"), found, expected, strict=True
            ):
                error = (ours.cpu().double() - exact).norm() / exact.norm()
                assert error < tolerance, (name, groups, reach, dtype, error)
