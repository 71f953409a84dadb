"""Products of weight gradients: right, added to the float32 sum, and 16-bit ones rounded once."""

import pytest
import torch
from torch import nn

from megatron_lite.parallel import weight_gradient
from megatron_lite.tensor_parallel.layers import parallel_linear, token_rows
from tests.support import cuda_addmm
from tests.support.torch_features import NEEDS_GRAD_DTYPE


def close(value, left, right, start=0.0):
    """Whether `value` is start + left right^T up to rounding.

    The bound on the error of a sum of k products holds in any order (Higham, Accuracy and
    Stability, sec. 3.1): k + 2 roundings of 2^-24 each, times the sum of the absolute products.
    """
    left, right = left.double(), right.double()
    exact = left @ right.t() + start
    bound = (left.shape[-1] + 2) * 2**-24 * (left.abs() @ right.abs().t() + abs(start))
    return bool(((value.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("first", [False, True])
@torch.no_grad()
def test_a_16_bit_product_is_rounded_once_and_added_to_the_float32_sum(first):
    x, dy = torch.randn(7, 20).bfloat16(), torch.randn(7, 33).bfloat16()
    start = torch.randn(33, 20)
    total = torch.full_like(start, torch.nan) if first else start.clone()
    weight_gradient.add_weight_product_(total, x, dy, first=first)
    rounded = (dy.t() @ x).float()
    assert torch.equal(total, rounded if first else start + rounded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [False, True])
@torch.no_grad()
def test_on_cuda_a_16_bit_product_is_added_unrounded_and_is_no_tensor(first, dtype, monkeypatch):
    calls = cuda_addmm.install(monkeypatch)
    x, dy = torch.randn(7, 20).to(dtype), torch.randn(7, 33).to(dtype)
    total = torch.full((33, 20), torch.nan) if first else torch.randn(33, 20)
    start = 0.0 if first else total.double()
    weight_gradient.add_weight_product_(total, x, dy, first=first)
    assert close(total, dy.t(), x.t(), start)
    assert calls == {"first" if first else "later": 1}


def test_a_backward_that_is_recorded_has_a_derivative():
    weight = torch.nn.Parameter(torch.randn(6, 4))
    x = torch.randn(5, 1, 4, requires_grad=True)
    output = parallel_linear(x, weight, None, tp_group=None, sequence_parallel=False, is_row=True)
    (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    expected = (x @ weight.t()).square().sum()
    (first,) = torch.autograd.grad(expected, x, create_graph=True)
    (expected,) = torch.autograd.grad(first.sum(), weight)
    # the rounding of sums of at most 30 terms of order 10
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-4)


ROWS, WIDTH = 11, 6
BATCHES = (torch.tensor([[3, 0, 3], [10, 3, 1]]), torch.tensor([[0, 0, 9], [2, 3, 2]]))


def table(dtype):
    weight = nn.Parameter(torch.randn(ROWS, WIDTH).to(dtype))
    if dtype != torch.float32:
        weight.grad_dtype = torch.float32
    return weight


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NEEDS_GRAD_DTYPE)]
)
def test_gradients_of_lookups_are_added_to_the_sum_of_a_step(dtype):
    weight = table(dtype)
    total = torch.full((ROWS, WIDTH), torch.nan)  # what an earlier step left
    weight_gradient.accumulate_lookup_(weight, total)
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
