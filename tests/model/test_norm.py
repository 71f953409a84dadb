"""RMSNorm on a CPU, which is our own there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.model.norm import rms_norm


def data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, weight, grad = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((7, 3, 10), (10,), (7, 3, 10))
    )
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), grad.to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
def test_values_and_gradients_are_torchs(dtype: torch.dtype, tolerance: float) -> None:
    x, weight, grad = data(dtype)
    ours = rms_norm(x, weight, 1e-5)
    theirs = F.rms_norm(x, (10,), weight, 1e-5)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    before = grad.clone()
    for mine, other in zip(
        torch.autograd.grad(ours, (x, weight), grad),
        torch.autograd.grad(theirs, (x, weight), grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * 10)
    assert torch.equal(grad, before)  # autograd may use it elsewhere too
