"""Packed documents and an MLP in tiles, on any device: against formulas in float64 on the CPU."""

import torch

from megatron_lite.context_parallel.attention_kernels import CuSeqlens, Readable
from megatron_lite.context_parallel.fused_attention import masked_attention
from tests.support.documents import attended_alone

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


def test_documents_are_attended_alone(device):
    """float32: a few times 1e-7, on a GPU 2e-5. bf16 rounds at 4e-3 what goes in and the output,
    which the sums of a query's gradient show most. A key of another document would change all by
    some tenths."""
    documents = CuSeqlens.of(BOUNDS, batch=B, seq_length=S, device=device)
    for groups, reach in ((HEADS, None), (2, None), (2, REACH)):
        expected = attended_alone(*inputs(groups), BOUNDS, reach=reach, scale=SCALE)
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
