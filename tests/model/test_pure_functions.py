"""Activations, norms and the rotation against torch's own functions in float64.

They are pairs of pure functions, run by torch's operators and as compiled kernels.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.model.activations import BIASED, PAIRS, TANH_GELU
from megatron_lite.model.norm import NORMS
from megatron_lite.model.rotary import ROTATION
from megatron_lite.parallel.compiled import CompiledKernels, Pair, applied
from tests.support.uncompiled import NEEDS_COMPILER, uncompiled_kernels

EPSILON = 1e-5


def swiglu(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rotated(heads, cos, sin):
    """Complex numbers whose parts lie half of the rotated channels apart."""
    half = cos.shape[-1] // 2
    turns = torch.complex(cos[..., :half], sin[..., :half])
    turned = torch.complex(heads[..., :half], heads[..., half : 2 * half]) * turns
    return torch.cat((turned.real, turned.imag, heads[..., 2 * half :]), -1)


def neighbours_rotated(heads, cos, sin):
    """Complex numbers whose parts are neighbours."""
    size = cos.shape[-2] * 2
    pairs = torch.view_as_complex(heads[..., :size].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.complex(cos[..., 0], sin[..., 0]))
    return torch.cat((turned.flatten(-2), heads[..., size:]), -1)


def random(*shape, seed=1):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


ANGLES = random(5, 1, 1, 3).repeat(1, 1, 1, 2)
PAIR_ANGLES = random(5, 1, 1, 3, 1).repeat(1, 1, 1, 1, 2)


class Case(NamedTuple):
    """A pair, the same function by torch, its inputs, and how many of them have a gradient."""

    pair: Pair
    exact: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    num_gradients: int = 1
    constants: Mapping[str, float] = MappingProxyType({})


X = 3.0 * random(5, 3, 8)
SHIFT = random(8, seed=4)
WEIGHT, BIAS = random(8, seed=2), random(8, seed=3)
CASES = {
    "erf": Case(PAIRS["gelu"], F.gelu, (X,)),
    "tanh": Case(TANH_GELU, partial(F.gelu, approximate="tanh"), (X,)),
    "swiglu": Case(PAIRS["swiglu"], swiglu, (X,)),
    "squared": Case(PAIRS["squared_relu"], lambda x: F.relu(x).square(), (X,)),
    "tanh of a sum": Case(
        BIASED[id(TANH_GELU)], lambda x, bias: F.gelu(x + bias, approximate="tanh"), (X, SHIFT), 2
    ),
    "swiglu of a sum": Case(
        BIASED[id(PAIRS["swiglu"])], lambda x, bias: swiglu(x + bias), (X, SHIFT), 2
    ),
    "LayerNorm": Case(
        NORMS["LayerNorm"],
        lambda x, weight, bias: F.layer_norm(x, (8,), weight, bias, EPSILON),
        (X, WEIGHT, BIAS),
        3,
        dict(epsilon=EPSILON),
    ),
    "RMSNorm": Case(
        NORMS["RMSNorm"],
        lambda x, weight: F.rms_norm(x, (8,), weight, EPSILON),
        (X, WEIGHT),
        2,
        dict(epsilon=EPSILON),
    ),
    "rotation": Case(ROTATION, rotated, (random(5, 3, 2, 8), ANGLES.cos(), ANGLES.sin())),
    "rotation of neighbours": Case(
        ROTATION, neighbours_rotated, (random(5, 3, 2, 8), PAIR_ANGLES.cos(), PAIR_ANGLES.sin())
    ),
}
# Relative to the largest value. 16-bit operators round between operations.
BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.04, torch.float16: 0.005}


def check(case, kernels, dtype):
    inputs = [tensor.to(dtype).requires_grad_() for tensor in case.inputs]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = case.exact(*wide)
    grad = expected.detach().cos().to(dtype)
    before = grad.clone()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        output = applied(case.pair, *inputs, kernels=kernels, **case.constants)
    of_inputs = [tensor.data_ptr() for tensor in inputs[case.pair.kept]]
    assert [tensor.data_ptr() for tensor in kept[: len(of_inputs)]] == of_inputs
    assert all(tensor.shape[-1] == 1 for tensor in kept[len(of_inputs) :])  # statistics of rows
    assert output.dtype == dtype
    found = torch.autograd.grad(output, inputs[: case.num_gradients], grad)
    exact = torch.autograd.grad(expected, wide[: case.num_gradients], grad.double())
    for ours, theirs in zip((output, *found), (expected, *exact), strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).abs().max() / theirs.abs().max() < BOUNDS[dtype]
    assert torch.equal(grad, before)  # autograd may use it elsewhere too


@pytest.mark.parametrize("kernels", [None, CompiledKernels()])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_what_is_kept(name, dtype, kernels, monkeypatch):
    uncompiled_kernels(monkeypatch)
    check(CASES[name], kernels, dtype)


@pytest.mark.weekly
@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", sorted(CASES))
def test_as_the_compiler_makes_them(name, dtype):
    kernels = CompiledKernels()
    check(CASES[name], kernels, dtype)
    assert len(kernels._graphs) == 2


def test_a_part_of_a_tensor_is_rotated_and_normalised_where_it_lies():
    """Queries and keys are views of one tensor."""
    for name in ("rotation", "RMSNorm", "LayerNorm"):
        pair, _, (x, *others), _, constants = CASES[name]
        view = torch.cat((x, x), 2)[:, :, : x.shape[2]]
        results = []
        for one in (x, view):
            leaf = one.detach().requires_grad_()
            output = applied(pair, leaf, *others, **constants)
            results.append((output, *torch.autograd.grad(output.square().sum(), leaf)))
        assert all(map(torch.equal, *results))
