"""Scaled rotary embeddings: the tables of transformers and of megatron-core, bit for bit."""

import json

import pytest
import torch

from megatron_lite.config.hf_config import from_hf
from megatron_lite.config.model import ModelConfig
from megatron_lite.model.rotary import rotary_tables
from tests.support.models import tiny_config

LENGTH, CHANNELS, BASE = 300, 64, 500000
LENGTH_BEFORE = "original_max_position_embeddings"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, LENGTH_BEFORE: 8192}
FACTOR, DIVISOR = "rope_scaling_factor", "rotary_seq_len_interpolation_factor"
SCALINGS = [{}, {FACTOR: 8.0}, {FACTOR: 32.0}, {DIVISOR: 3}, {FACTOR: 2.5, DIVISOR: 4}]


def cosines(model, length=LENGTH):
    cos, _ = rotary_tables(model, length, device=torch.device("cpu"), dtype=torch.float32)
    return cos[:, 0, 0, : CHANNELS // 2]


LONGROPE = dict(
    short_factor=[1 + i / 10 for i in range(32)], long_factor=[1 + i for i in range(32)]
)
# Rules of transformers with their parameters, and of which length the sequences are.
RULES = {
    "llama3 by 8": (dict(rope_type="llama3", factor=8.0, **LLAMA3), LENGTH),
    "yarn of DeepSeek": (
        dict(rope_type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.7),
        LENGTH,
    ),
    "yarn of GPT-OSS's turns": (
        dict(rope_type="yarn", factor=2.5, beta_fast=8.0, beta_slow=2.0),
        90,
    ),
    "yarn that is told all": (dict(rope_type="yarn", factor=4.0, attention_factor=1.5), LENGTH),
    "longrope": (dict(rope_type="longrope", factor=4.0, **LONGROPE), 128),
    "longrope beyond": (dict(rope_type="longrope", factor=4.0, **LONGROPE), 129),
    "longrope by lengths": (dict(rope_type="longrope", **LONGROPE), LENGTH),
}


@pytest.mark.parametrize("rule", RULES)
def test_scaled_tables_equal_those_of_transformers(rule):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters, length = RULES[rule]
    rope = {"rope_theta": float(BASE), LENGTH_BEFORE: 128, **parameters}
    config = transformers.LlamaConfig(
        hidden_size=4 * CHANNELS,
        num_attention_heads=4,
        head_dim=CHANNELS,
        max_position_embeddings=512,
        rope_parameters=rope,
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
        config, torch.device("cpu"), seq_len=length
    )
    plain = 1.0 / BASE ** (torch.arange(0, CHANNELS, 2) / CHANNELS)
    shares = frequencies / plain
    if rope["rope_type"] != "longrope":
        assert shares.min() < 1.001 / rope["factor"] and shares.max() == 1.0
        assert ((shares > 1.001 / rope["factor"]) & (shares < 0.999)).any(), "none lies between"
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    model = ModelConfig(**from_hf(json.loads(config.to_json_string())).fields)
    assert torch.equal(cosines(model, length), angles.cos() * magnitude)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_tables_equal_those_of_megatron_core(scaling):
    pytest.importorskip("megatron.core")
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    model = tiny_config(
        kv_channels=CHANNELS,
        position_embedding_type="rope",
        rotary_base=BASE,
        use_rope_scaling=FACTOR in scaling,
        **scaling,
    )
    theirs = RotaryEmbedding(
        CHANNELS,
        1.0,
        rotary_base=BASE,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        use_cpu_initialization=True,
    )
    assert torch.equal(cosines(model), theirs.get_freqs_non_repeated(LENGTH).cos())
