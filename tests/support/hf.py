"""Randomly initialised models of transformers, our configs of them, and our names of their tensors.

`our_tensors` is linear, so it maps weights to weights and gradients to gradients. The layouts of
transformers and of this project differ:

    transformers                                            here
    GPT-2's Conv1D holds [in, out]                          [out, in]
    GPT-2's c_attn is [all q, all k, all v]; Llama has      one matrix, group by group: [q .. q k v]
    three matrices
    Llama has gate_proj and up_proj                         one linear_fc1 [gate; up]
    Nemotron stores norm weights minus 1                    as they are (the test adds the 1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig

# D = H / A: transformers' GPT-2 and GPT-NeoX know no other
V, H, F, A, G, L, D, POSITIONS = 61, 32, 40, 4, 2, 2, 8, 17
RENAMED = {  # module names within a layer
    "attn.c_proj": "self_attention.linear_proj",
    "attn.c_attn": "self_attention.linear_qkv",
    "mlp.c_fc": "mlp.linear_fc1",
    "mlp.c_proj": "mlp.linear_fc2",
    "ln_1": "input_layernorm",
    "ln_2": "pre_mlp_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "mlp.down_proj": "mlp.linear_fc2",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "input_layernorm": "input_layernorm",
    "attention.query_key_value": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}


@dataclass(frozen=True)
class Peer:
    """A model family: its model in transformers, our config of it, and the names of its tensors."""

    build: Callable[[], nn.Module]
    config: dict[str, object]
    layer: str  # prefix of layer N
    embedding: str
    final_norm: str
    output: str | None


def _random(model_class: str, config_class: str, **config: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(11)
        model = getattr(transformers, model_class)(
            getattr(transformers, config_class)(vocab_size=V, attn_implementation="eager", **config)
        )
        for name, parameter in model.named_parameters():  # zeros and ones would hide mistakes
            if parameter.dim() == 1:
                nn.init.normal_(
                    parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3
                )
        return model.eval()

    return build


_LLAMA_SIZES = dict(
    hidden_size=H,
    intermediate_size=F,
    num_hidden_layers=L,
    num_attention_heads=A,
    num_key_value_heads=G,
    head_dim=6,
    max_position_embeddings=POSITIONS,
    tie_word_embeddings=False,
    initializer_range=0.2,
    rope_parameters=dict(rope_type="default", rope_theta=500.0),
    rms_norm_eps=1e-4,
)
_LLAMA = dict(
    kv_channels=6,
    group_query_attention=True,
    num_query_groups=G,
    position_embedding_type="rope",
    rotary_base=500,
    normalization="RMSNorm",
    norm_epsilon=1e-4,
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
_LLAMA_NAMES = dict(
    layer="model.layers",
    embedding="model.embed_tokens.weight",
    final_norm="model.norm",
    output="lm_head.weight",
)
_QWEN2_SIZES = {key: value for key, value in _LLAMA_SIZES.items() if key != "head_dim"}

PEERS = {
    "gpt2": Peer(
        build=_random(
            "GPT2LMHeadModel",
            "GPT2Config",
            n_embd=H,
            n_inner=F,
            n_layer=L,
            n_head=A,
            n_positions=POSITIONS,
            initializer_range=0.2,
        ),
        config={},
        layer="transformer.h",
        embedding="transformer.wte.weight",
        final_norm="transformer.ln_f",
        output=None,
    ),
    "llama": Peer(
        build=_random("LlamaForCausalLM", "LlamaConfig", **_LLAMA_SIZES),
        config=_LLAMA,
        **_LLAMA_NAMES,
    ),
    "qwen2": Peer(
        build=_random("Qwen2ForCausalLM", "Qwen2Config", **_QWEN2_SIZES),
        config={**_LLAMA, "kv_channels": D, "add_qkv_bias": True},
        **_LLAMA_NAMES,
    ),
    "qwen3": Peer(
        build=_random("Qwen3ForCausalLM", "Qwen3Config", **_LLAMA_SIZES),
        config={**_LLAMA, "qk_layernorm": True},
        **_LLAMA_NAMES,
    ),
    # In transformers a window of 4 tokens includes the query's own token. The layers from number
    # max_window_layers on have a window.
    "mistral": Peer(
        build=_random("MistralForCausalLM", "MistralConfig", sliding_window=4, **_LLAMA_SIZES),
        config={**_LLAMA, "window_size": (3, 0)},
        **_LLAMA_NAMES,
    ),
    "qwen2 with windows": Peer(
        build=_random(
            "Qwen2ForCausalLM",
            "Qwen2Config",
            use_sliding_window=True,
            sliding_window=4,
            max_window_layers=1,
            **_QWEN2_SIZES,
        ),
        config={
            **_LLAMA,
            "kv_channels": D,
            "add_qkv_bias": True,
            "window_size": (3, 0),
            "window_attn_skip_freq": (0, 1),
        },
        **_LLAMA_NAMES,
    ),
    # In transformers no_rope_layers is 1 for a layer that does use rotary embeddings.
    "smollm3": Peer(
        build=_random(
            "SmolLM3ForCausalLM",
            "SmolLM3Config",
            no_rope_layers=[1, 0],
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            pad_token_id=None,
            **_QWEN2_SIZES,
        ),
        config={
            **_LLAMA,
            "kv_channels": D,
            "no_rope_freq": 2,
            "window_size": (4, 0),
            "window_attn_skip_freq": 2,
        },
        **_LLAMA_NAMES,
    ),
    "gpt_neox": Peer(
        build=_random(
            "GPTNeoXForCausalLM",
            "GPTNeoXConfig",
            hidden_size=H,
            intermediate_size=F,
            num_hidden_layers=L,
            num_attention_heads=A,
            max_position_embeddings=POSITIONS,
            use_parallel_residual=False,
            tie_word_embeddings=False,
            initializer_range=0.2,
            rope_parameters=dict(
                rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5
            ),
        ),
        config=dict(
            position_embedding_type="rope",
            rotary_percent=0.5,
            bias_gelu_fusion=False,
            untie_embeddings_and_output_weights=True,
        ),
        layer="gpt_neox.layers",
        embedding="gpt_neox.embed_in.weight",
        final_norm="gpt_neox.final_layer_norm",
        output="lm_head.weight",
    ),
    "nemotron": Peer(
        build=_random(
            "NemotronForCausalLM",
            "NemotronConfig",
            hidden_size=H,
            intermediate_size=F,
            num_hidden_layers=L,
            num_attention_heads=A,
            num_key_value_heads=G,
            head_dim=D,
            max_position_embeddings=POSITIONS,
            initializer_range=0.2,
            rope_parameters=dict(
                rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5
            ),
        ),
        config=dict(
            group_query_attention=True,
            num_query_groups=G,
            position_embedding_type="rope",
            rotary_percent=0.5,
            squared_relu=True,
            add_bias_linear=False,
            untie_embeddings_and_output_weights=True,
        ),
        **_LLAMA_NAMES,
    ),
    # At this base one of the three frequencies is fast, one is between, and one is slow.
    "llama 3.1": Peer(
        build=_random(
            "LlamaForCausalLM",
            "LlamaConfig",
            **{
                **_LLAMA_SIZES,
                "rope_parameters": dict(
                    rope_type="llama3",
                    rope_theta=2.6e8,
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=8192,
                ),
            },
        ),
        config={**_LLAMA, "rotary_base": 260_000_000, "use_rope_scaling": True},
        **_LLAMA_NAMES,
    ),
    "llama with longer positions": Peer(
        build=_random(
            "LlamaForCausalLM",
            "LlamaConfig",
            **{
                **_LLAMA_SIZES,
                "rope_parameters": dict(rope_type="linear", rope_theta=500.0, factor=2.0),
            },
        ),
        config={**_LLAMA, "rotary_seq_len_interpolation_factor": 2},
        **_LLAMA_NAMES,
    ),
}


def our_config(peer: Peer) -> ModelConfig:
    """Returns our config of the peer's model."""
    sizes: dict[str, object] = dict(
        num_layers=L,
        hidden_size=H,
        num_attention_heads=A,
        ffn_hidden_size=F,
        max_position_embeddings=POSITIONS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return ModelConfig(**{**sizes, **peer.config})  # type: ignore[arg-type]


def our_tensors(peer: Peer, theirs: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Returns the peer's weights, or its gradients, under our names and in our layout."""
    ours = {"embedding.word_embeddings.weight": theirs[peer.embedding]}
    if "transformer.wpe.weight" in theirs:
        ours["embedding.position_embeddings.weight"] = theirs["transformer.wpe.weight"]
    if peer.output is not None:
        ours["output_layer.weight"] = theirs[peer.output]
    for kind in ("weight", "bias"):
        if f"{peer.final_norm}.{kind}" in theirs:
            ours[f"decoder.final_layernorm.{kind}"] = theirs[f"{peer.final_norm}.{kind}"]
    for number in range(L):
        prefix = f"{peer.layer}.{number}."
        layer = {
            name.removeprefix(prefix): tensor
            for name, tensor in theirs.items()
            if name.startswith(prefix)
        }
        ours.update(
            {
                f"decoder.layers.{number}.{name}": tensor
                for name, tensor in _our_layer(layer, config).items()
            }
        )
    return ours


def _our_layer(theirs: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    ours = {}
    for name, tensor in theirs.items():
        module, _, kind = name.rpartition(".")
        if module in RENAMED:
            is_conv1d = ".c_" in name and kind == "weight"
            ours[f"{RENAMED[module]}.{kind}"] = tensor.t() if is_conv1d else tensor
    for kind in ("weight", "bias"):
        qkv = f"self_attention.linear_qkv.{kind}"
        if f"attn.c_attn.{kind}" in theirs:
            ours[qkv] = _by_group(*ours[qkv].chunk(3), groups=A)
        if f"self_attn.q_proj.{kind}" in theirs:
            ours[qkv] = _by_group(
                *(theirs[f"self_attn.{part}_proj.{kind}"] for part in "qkv"),
                groups=config.query_groups,
            )
    if "mlp.gate_proj.weight" in theirs:
        ours["mlp.linear_fc1.weight"] = torch.cat(
            (theirs["mlp.gate_proj.weight"], theirs["mlp.up_proj.weight"])
        )
    elif "mlp.up_proj.weight" in theirs:
        ours["mlp.linear_fc1.weight"] = theirs["mlp.up_proj.weight"]
    return ours


def _by_group(query: Tensor, key: Tensor, value: Tensor, *, groups: int) -> Tensor:
    """Joins q, k and v by group: [a d, ..], [g d, ..], [g d, ..] -> [g (a/g + 2) d, ..]."""
    parts = zip(*(tensor.chunk(groups) for tensor in (query, key, value)), strict=True)
    return torch.cat([part for group in parts for part in group])
