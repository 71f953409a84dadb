"""Attention windows and layers without rotary embedding: against the softmax formula and
torch's own masked attention."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.context_parallel.attention_kernels import (
    CuSeqlens,
    Readable,
    cpu_attention_takes_groups,
)
from megatron_lite.context_parallel.fused_attention import masked_attention
from megatron_lite.model import attention as core_attention
from megatron_lite.model.attention import CoreAttention
from tests.support.documents import attended_alone
from tests.support.models import tiny_config, tp_state

S, B, A, D = 9, 2, 6, 4
SCALE = D**-0.5


def draw(*shape, seed, dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def heads(groups, *, s=S, b=B, a=A, dtype=torch.float64):
    """query, key and value that need gradients."""
    shapes = ((s, b, a, D), (s, b, groups, D), (s, b, groups, D))
    query, key, value = (
        draw(*shape, seed=seed, dtype=dtype).requires_grad_()
        for seed, shape in enumerate(shapes, 1)
    )
    return query, key, value


def core(backend, *, layer=0, **overrides):
    config = tiny_config(
        attention_backend=backend, num_attention_heads=A, kv_channels=D, **overrides
    )
    with tp_state(1) as parallel:
        return CoreAttention(config, parallel.rng, layer=layer)


# --- core attention ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
# 1100: whole blocks of a row's keys are hidden
@pytest.mark.parametrize("s, reach", [(9, 0), (70, 5), (70, 33), (1100, 3)])
def test_the_bits_are_those_of_torchs_attention_with_a_mask(s, reach, dtype):
    """Which keeps the mask, works on the half above the diagonal too, and is otherwise the same
    kernel."""
    inputs = heads(1, s=s, b=1, a=2, dtype=dtype)
    grad = draw(s, 1, 2, D, seed=5, dtype=dtype)
    output = masked_attention(*inputs, Readable(reach), scale=SCALE)
    places = torch.arange(s)
    distance = places.unsqueeze(1) - places
    hidden = torch.zeros(s, s, dtype=dtype).masked_fill_(
        (distance < 0) | (distance > reach), -torch.inf
    )
    query, *shared = (tensor.permute(1, 2, 0, 3) for tensor in inputs)
    if not cpu_attention_takes_groups():
        shared = [tensor.repeat_interleave(2, 1) for tensor in shared]
    theirs = F.scaled_dot_product_attention(
        query, *shared, attn_mask=hidden, scale=SCALE, enable_gqa=True
    ).permute(2, 0, 1, 3)
    assert torch.equal(output, theirs)
    ours = torch.autograd.grad(output, inputs, grad)
    assert all(map(torch.equal, ours, torch.autograd.grad(theirs, inputs, grad)))
    assert all(tensor.isfinite().all() for tensor in ours)


def test_autocast_takes_its_dtype_as_torchs_attention_does():
    query, key, value = heads(3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert core("flash", window_size=(3, 0))(query, key, value).dtype == torch.bfloat16


# --- documents ---

BOUNDS = (0, 3, 4, 9, 18)  # of two samples


@pytest.mark.parametrize("reach", [None, 0, 2, S - 1])
@pytest.mark.parametrize("groups", [A, 3, 1])
@pytest.mark.parametrize("bounds", [BOUNDS, (0, S, 2 * S)])
def test_documents_and_windows_are_attended_as_by_the_formula(bounds, groups, reach, monkeypatch):
    """In float64, by every backend. Samples of one document are attended without bounds too, also
    where no kernel of ours takes them, as on CUDA in float64 or with dropout."""
    documents = CuSeqlens.of(bounds, batch=B, seq_length=S, device=torch.device("cpu"))
    inputs, grad = heads(groups), draw(S, B, A, D, seed=7)
    expected = attended_alone(*inputs, grad, bounds, reach=reach, scale=SCALE)
    outputs = [masked_attention(*inputs, Readable(reach, documents), scale=SCALE)]
    window = {} if reach is None else dict(window_size=(reach, 0))
    attentions = [core(backend, **window) for backend in ("flash", "unfused", "auto")]
    outputs += [attention(*inputs, documents) for attention in attentions]
    if bounds != BOUNDS:
        outputs += [attention(*inputs) for attention in attentions]
        monkeypatch.setattr(core_attention, "has_kernel", lambda query: False)
        outputs += [attention(*inputs) for attention in attentions]
    for output in (each.view(S, B, A, D) for each in outputs):
        found = [output, *torch.autograd.grad(output, inputs, grad)]
        for ours, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "bounds", [[], [0], [0, 18], [0, 9], [1, 9, 18], [0, 9, 9, 18], [0, 9, 27]]
)
def test_bounds_that_are_none_of_documents_are_refused(bounds):
    with pytest.raises(ValueError, match="rise from 0 to 18 and pass every multiple of 9") as told:
        CuSeqlens.of(bounds, batch=B, seq_length=S, device=torch.device("cpu"))
    assert f"(got {bounds})" in str(told.value)
