"""Core attention against a loop over heads, rows and keys; and what causality means for the whole
model."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.model.attention import CoreAttention, SelfAttention
from tests.model.test_window import by_loops
from tests.support.equality import variant_config
from tests.support.models import build_tiny_model, sample_tokens, tiny_config, tp_state

S, B, A, G, D = 7, 2, 6, 3, 4  # 6 heads in 3 groups


def draw(*shape, seed, dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def core(backend, **overrides):
    config = tiny_config(
        attention_backend=backend, num_attention_heads=A, kv_channels=D, **overrides
    )
    with tp_state(1) as parallel:
        return CoreAttention(config, parallel.rng, layer=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
@pytest.mark.parametrize(
    ("backend", "in_fp32"), [("unfused", True), ("unfused", False), ("flash", False)]
)
def test_16_bit_attention_is_as_exact_as_its_dtype_and_gives_it_back(
    backend, in_fp32, dtype, tolerance
):
    """Scores and weights are rounded to 8 or 11 bits: 1% or 0.1% of values of order 1, a few times
    over."""
    query, key, value = (draw(S, B, A, D, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    output = core(backend, attention_softmax_in_fp32=in_fp32)(query, key, value)
    assert output.dtype == dtype
    expected = by_loops(query.double(), key.double(), value.double(), S)
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


def test_qkv_rows_go_group_by_group():
    """linear_qkv's output for a group: its queries, then its key, then its value (checkpoints of
    the field rely on it)."""
    config = tiny_config(
        num_attention_heads=A, kv_channels=D, group_query_attention=True, num_query_groups=G
    )
    with tp_state(1) as parallel:
        attention = build_tiny_model(config, parallel).decoder.layers[0].self_attention
    assert isinstance(attention, SelfAttention)
    rows = torch.arange(float((A + 2 * G) * D)).view(1, 1, -1)
    query, key, value = attention._split_heads(rows)
    per_group = rows.view(G, A // G + 2, D)
    assert torch.equal(query[0, 0], per_group[:, : A // G].reshape(A, D))
    assert torch.equal(key[0, 0], per_group[:, -2])
    assert torch.equal(value[0, 0], per_group[:, -1])


def test_a_second_sequence_length_gets_its_own_rotary_tables():
    tokens, _ = sample_tokens()
    with tp_state(1) as parallel, torch.no_grad():
        model = build_tiny_model(variant_config("llama"), parallel)
        whole, short, again = model(tokens), model(tokens[:, :5]), model(tokens)
    torch.testing.assert_close(short, whole[:, :5], rtol=1e-12, atol=1e-12)
    assert torch.equal(whole, again)
