"""The lookup of token rows adds its gradient to the table's own sum, if the table has one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_lite.parallel.weight_gradient import accumulate_lookups_, lookup_adds
from megatron_lite.tensor_parallel.lookup import token_rows
from tests.support.torch_features import NEEDS_GRAD_DTYPE

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


def test_a_frozen_table_gets_no_gradient() -> None:
    weight = table(torch.float32).requires_grad_(False)
    accumulate_lookups_([(weight, torch.zeros(ROWS, WIDTH))])
    hidden = token_rows(BATCHES[0], weight) * nn.Parameter(torch.ones(WIDTH))
    hidden.sum().backward()
    assert weight.grad is None


def test_a_table_without_a_sum_leaves_its_gradient_to_autograd() -> None:
    weight = table(torch.float32)
    token_rows(BATCHES[0], weight).sum().backward()
    assert weight.grad is not None and weight.grad[3, 0] == 3.0


@NEEDS_GRAD_DTYPE
def test_on_other_devices_float32_tables_are_left_to_autograd() -> None:
    """A sum of rows has another order each time on CUDA."""
    meta = nn.Parameter(torch.empty(2, 2, device="meta"))
    assert lookup_adds(table(torch.float32)) and lookup_adds(table(torch.bfloat16))
    assert not lookup_adds(meta)
