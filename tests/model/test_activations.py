"""The activations that keep their input alone, against torch's own operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.model.activations import squared_relu, swiglu, tanh_gelu


def composed_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize(
    ("ours", "composed"), [(swiglu, composed_swiglu), (squared_relu, lambda x: F.relu(x).square())]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_are_equal_gradients_too_and_only_the_input_is_kept(
    ours, composed, dtype: torch.dtype
) -> None:  # type: ignore[no-untyped-def]
    x = (
        torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        output = ours(x)
    assert len(kept) == 1 and kept[0].data_ptr() == x.data_ptr()
    expected = composed(x)
    assert torch.equal(output, expected)
    grad = torch.linspace(-1.0, 1.0, output.numel()).view_as(output).to(dtype)
    # rounded between operations in another order
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(output, x, grad)[0],
        torch.autograd.grad(expected, x, grad)[0],
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("function", [swiglu, squared_relu, tanh_gelu])
def test_gradients_are_those_of_finite_differences(function) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(
        3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    assert torch.autograd.gradcheck(function, x)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)],
)
def test_the_tanh_gelu_is_torchs_to_rounding_and_keeps_its_input(
    dtype: torch.dtype, tolerance: float
) -> None:
    x = torch.linspace(-12.0, 12.0, 3 * 5_001, dtype=torch.float64).view(3, -1).to(dtype)
    x.requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        output = tanh_gelu(x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
    exact = F.gelu(x.detach().double(), approximate="tanh")
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 0.0) * exact.abs()
    assert ((output.double() - exact).abs() <= tolerance + rounding).all()
    expected = F.gelu(x, approximate="tanh")
    grad = torch.ones_like(x)
    assert torch.equal(
        torch.autograd.grad(output, x, grad)[0], torch.autograd.grad(expected, x, grad)[0]
    )
