"""Well-known models by name, as the fields of ModelConfig and the size of the vocabulary.

The sizes are those of the papers and of the models' published configurations. Every preset has its
published number of parameters (tests/config/test_model_presets.py). Standard library only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_lite.config.checks import InputError
from megatron_lite.config.json_text import shown


class Preset(NamedTuple):
    """A model. fields: those of ModelConfig that differ from the defaults. vocab_size: V."""

    fields: Mapping[str, Any]
    vocab_size: int


def _gpt(layers: int, hidden: int, heads: int, positions: int, vocab_size: int) -> Preset:
    """Returns a GPT-2 or GPT-3: learned positions, LayerNorm, GELU, biases, tied embeddings."""
    return Preset(
        dict(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            max_position_embeddings=positions,
        ),
        vocab_size,
    )


def _llama(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    groups: int,
    *,
    positions: int,
    vocab_size: int,
    rotary_base: int,
) -> Preset:
    """Returns a Llama: rotary positions, RMSNorm, SwiGLU, no biases, no dropout, untied."""
    grouped = dict(group_query_attention=True, num_query_groups=groups) if groups < heads else {}
    return Preset(
        dict(
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=ffn,
            num_attention_heads=heads,
            **grouped,
            max_position_embeddings=positions,
            position_embedding_type="rope",
            rotary_base=rotary_base,
            normalization="RMSNorm",
            swiglu=True,
            add_bias_linear=False,
            untie_embeddings_and_output_weights=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        vocab_size,
    )


def _llama2(layers: int, hidden: int, ffn: int, heads: int, groups: int) -> Preset:
    sizes = dict(positions=4096, vocab_size=32000, rotary_base=10000)
    return _llama(layers, hidden, ffn, heads, groups, **sizes)


def _llama3(layers: int, hidden: int, ffn: int, heads: int) -> Preset:
    sizes = dict(positions=8192, vocab_size=128256, rotary_base=500000)
    return _llama(layers, hidden, ffn, heads, 8, **sizes)


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, *, tied: bool = False) -> Preset:
    """Returns a dense Qwen3: a Llama with norms of queries and keys, and heads of 128 channels."""
    sizes = dict(positions=40960, vocab_size=151936, rotary_base=1000000)
    llama = _llama(layers, hidden, ffn, heads, 8, **sizes)
    own = dict(
        kv_channels=128,
        qk_layernorm=True,
        norm_epsilon=1e-6,
        untie_embeddings_and_output_weights=not tied,
    )
    return llama._replace(fields={**llama.fields, **own})


PRESETS: Mapping[str, Preset] = {
    "gpt2": _gpt(12, 768, 12, 1024, 50257),
    "gpt2-medium": _gpt(24, 1024, 16, 1024, 50257),
    "gpt2-large": _gpt(36, 1280, 20, 1024, 50257),
    "gpt2-xl": _gpt(48, 1600, 25, 1024, 50257),
    "gpt3-175b": _gpt(96, 12288, 96, 2048, 50257),
    # arXiv 2407.21783 and 2307.09288
    "llama2-7b": _llama2(32, 4096, 11008, 32, 32),
    "llama2-13b": _llama2(40, 5120, 13824, 40, 40),
    "llama2-70b": _llama2(80, 8192, 28672, 64, 8),
    "llama3-8b": _llama3(32, 4096, 14336, 32),
    "llama3-70b": _llama3(80, 8192, 28672, 64),
    "llama3-405b": _llama3(126, 16384, 53248, 128),
    # arXiv 2505.09388
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
    # arXiv 2205.05198, table 3
    "22b": _gpt(48, 6144, 64, 2048, 51200),
    "175b": _gpt(96, 12288, 96, 2048, 51200),
    "530b": _gpt(105, 20480, 128, 2048, 51200),
    "1t": _gpt(128, 25600, 160, 2048, 51200),
}


def preset(name: str) -> Preset:
    """Returns the model with this name.

    Raises InputError for an unknown name, with the names that are nearest to it.
    """
    if name not in PRESETS:
        near = nearest_presets(name)
        meant = f"did you mean {' or '.join(near)}? The names are" if near else "give one of"
        raise InputError(
            f"--model {shown(repr(name))} is not known: {meant} {', '.join(PRESETS)}; for another "
            "model give --hf-config FILE, or the flags of its sizes"
        )
    return PRESETS[name]


def nearest_presets(name: str) -> list[str]:
    """Returns up to three names of presets, nearest first, for a name that is none.

    Only letters and digits count, so `meta-llama/Meta-Llama-3-8B` is near to `llama3-8b`.
    """
    plain = {re.sub(r"[^a-z0-9]", "", known): known for known in PRESETS}
    word = re.sub(r"[^a-z0-9]", "", name.lower().rpartition("/")[2])
    if word in plain:
        return [plain[word]]
    return [plain[one] for one in difflib.get_close_matches(word, plain, n=3, cutoff=0.65)]
