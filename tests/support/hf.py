"""Randomly initialised models of transformers, and our configs of them, written by hand.

The configs check the mapping of config.json (config/hf_config.py). The weights are mapped by the
library (convert/hf.py); transformers' own logits and gradients check that mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.hf import LAYOUTS, known_name, row_of
from megatron_lite.convert.weights import is_buffer, parameter_specs

# D = H / A: transformers' GPT-2 and GPT-NeoX know no other
V, H, F, A, G, L, D, POSITIONS = 61, 32, 40, 4, 2, 2, 8, 17


@dataclass(frozen=True)
class Peer:
    """A model of a family in transformers, and our config of it."""

    build: Callable[[], nn.Module]
    config: dict[str, object]


def _of_type(name: str, **config: object) -> Callable[[], nn.Module]:
    """Returns `_random` of a family whose model is the class of another one."""
    return _random("LlamaForCausalLM", "", model_type=name, **config)


def _random(model_class: str, config_class: str, **config: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(11)
        make = getattr(transformers, config_class or "AutoConfig")
        make = make if config_class else make.for_model
        model = getattr(transformers, model_class)(
            make(vocab_size=V, attn_implementation="eager", **deepcopy(config))  # some change it
        )
        for name, parameter in model.named_parameters():  # zeros and ones would hide mistakes
            if parameter.dim() == 1:
                nn.init.normal_(
                    parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3
                )
        return model.eval()

    return build


_SIZES = dict(
    hidden_size=H,
    intermediate_size=F,
    num_hidden_layers=L,
    num_attention_heads=A,
    max_position_embeddings=POSITIONS,
    initializer_range=0.2,
)
_LLAMA_SIZES = dict(
    **_SIZES,
    num_key_value_heads=G,
    head_dim=6,
    tie_word_embeddings=False,
    rope_parameters=dict(rope_type="default", rope_theta=500.0),
    rms_norm_eps=1e-4,
)
_HALF_ROTATED = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
_NEOX = dict(
    position_embedding_type="rope",
    rotary_percent=0.5,
    bias_gelu_fusion=False,
    untie_embeddings_and_output_weights=True,
)


def _neox(*, parallel: bool) -> Callable[[], nn.Module]:
    return _random(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        **_SIZES,
        use_parallel_residual=parallel,
        tie_word_embeddings=False,
        rope_parameters=_HALF_ROTATED,
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
_WINDOWS: dict[str, object] = dict(window_size=(3, 0), window_attn_skip_freq=(0, 1))
_QWEN2_SIZES = {key: value for key, value in _LLAMA_SIZES.items() if key != "head_dim"}
_DEEPSEEK: dict[str, Any] = dict(
    **_SIZES,
    **dict(kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7),
    num_key_value_heads=A,
    **dict(n_routed_experts=8, n_shared_experts=2, moe_intermediate_size=12),
    **dict(num_experts_per_tok=4, first_k_dense_replace=1, routed_scaling_factor=1.5),
    **dict(tie_word_embeddings=False, pad_token_id=None),
)
_LATENT: dict[str, object] = {
    **{key: value for key, value in _LLAMA.items() if "group" not in key and key != "kv_channels"},
    **dict(multi_latent_attention=True, qk_layernorm=True, kv_lora_rank=10, qk_head_dim=6),
    **dict(qk_pos_emb_head_dim=4, v_head_dim=7, num_experts=8, moe_ffn_hidden_size=12),
    **dict(moe_shared_expert_intermediate_size=24, moe_router_topk=4, moe_layer_freq=(0, 1)),
    **dict(moe_router_topk_scaling_factor=1.5, norm_epsilon=1e-6),
}
_EXPERTS = dict(_LLAMA_SIZES, num_experts_per_tok=3, pad_token_id=None)
_QWEN2_EXPERTS = dict(_QWEN2_SIZES, num_experts_per_tok=3, pad_token_id=None)


def _llama_of_rule(theirs: dict[str, object], ours: dict[str, object]) -> Peer:
    """Returns Llama with a scaled rotary embedding."""
    rope = dict(theirs, rope_theta=500.0)
    build = _random("LlamaForCausalLM", "LlamaConfig", **{**_LLAMA_SIZES, "rope_parameters": rope})
    return Peer(build, {**_LLAMA, **ours})


_NEOX = dict(
    hidden_size=H,
    intermediate_size=F,
    num_hidden_layers=L,
    num_attention_heads=A,
    max_position_embeddings=POSITIONS,
    tie_word_embeddings=False,
    initializer_range=0.2,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
)
_HALF_ROTATED = dict(
    position_embedding_type="rope", rotary_percent=0.5, untie_embeddings_and_output_weights=True
)

_YARN: dict[str, object] = dict(
    rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=8
)
_WITH_YARN: dict[str, object] = dict(
    rope_type="yarn", rotary_scaling_factor=4.0, original_max_position_embeddings=8
)
_GPT2_SIZES: dict[str, object] = dict(
    n_embd=H, n_inner=F, n_layer=L, n_head=A, n_positions=POSITIONS, initializer_range=0.2
)
_MULTIPLIERS: dict[str, object] = dict(
    embedding_multiplier=3.0, residual_multiplier=0.22, logits_scaling=6.0, attention_multiplier=0.3
)
_MULTIPLIED = dict(embedding_multiplier=3.0, residual_multiplier=0.22, softmax_scale=0.3)
_GLM: dict[str, object] = dict(
    head_dim=D,
    pad_token_id=None,
    rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5),
)
_COHERE_SIZES = {key: value for key, value in _QWEN2_SIZES.items() if key != "rms_norm_eps"}
_COHERE_SIZES |= dict(layer_norm_eps=1e-4, pad_token_id=None)
_COHERE: dict[str, object] = {
    **_LLAMA,
    **dict(kv_channels=D, normalization="BiaslessLayerNorm"),
    **dict(parallel_residual=True, shared_norm=True),
}
_GEMMA_SIZES = {**_LLAMA_SIZES, "tie_word_embeddings": True, "pad_token_id": None}
_GEMMA: dict[str, object] = {
    **_LLAMA,
    **dict(swiglu=False, geglu=True, apply_layernorm_1p=True, embedding_multiplier=H**0.5),
    "untie_embeddings_and_output_weights": False,
}

PEERS = {
    "gpt2": Peer(build=_random("GPT2LMHeadModel", "GPT2Config", **_GPT2_SIZES), config={}),
    "llama": Peer(build=_random("LlamaForCausalLM", "LlamaConfig", **_LLAMA_SIZES), config=_LLAMA),
    "qwen2": Peer(
        build=_random("Qwen2ForCausalLM", "Qwen2Config", **_QWEN2_SIZES),
        config={**_LLAMA, "kv_channels": D, "add_qkv_bias": True},
    ),
    "qwen3": Peer(
        build=_random("Qwen3ForCausalLM", "Qwen3Config", **_LLAMA_SIZES),
        config={**_LLAMA, "qk_layernorm": True},
    ),
    # In transformers a window of 4 tokens includes the query's own token. The layers from number
    # max_window_layers on have a window.
    "mistral": Peer(
        build=_random("MistralForCausalLM", "MistralConfig", sliding_window=4, **_LLAMA_SIZES),
        config={**_LLAMA, "window_size": (3, 0)},
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
        config={**_LLAMA, "kv_channels": D, "add_qkv_bias": True, **_WINDOWS},
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
    ),
    "gpt_neox": Peer(
        build=_random("GPTNeoXForCausalLM", "GPTNeoXConfig", **_NEOX, use_parallel_residual=False),
        config={**_HALF_ROTATED, "bias_gelu_fusion": False},
    ),
    "gpt_neox with a parallel residual": Peer(
        build=_random("GPTNeoXForCausalLM", "GPTNeoXConfig", **_NEOX),
        config={**_HALF_ROTATED, "bias_gelu_fusion": False, "parallel_residual": True},
    ),
    "nemotron": Peer(
        build=_random(
            "NemotronForCausalLM", "NemotronConfig", **_NEOX, num_key_value_heads=G, head_dim=D
        ),
        config={
            **_HALF_ROTATED,
            **dict(group_query_attention=True, num_query_groups=G, squared_relu=True),
            **dict(apply_layernorm_1p=True, add_bias_linear=False),
        },
    ),
    "olmo2": Peer(
        build=_random("Olmo2ForCausalLM", "Olmo2Config", pad_token_id=None, **_QWEN2_SIZES),
        config={
            **_LLAMA,
            "kv_channels": D,
            "norm_position": "after",
            "qk_layernorm": True,
            "qk_layernorm_scope": "all-heads",
        },
    ),
    "phi3": Peer(
        build=_random(
            "Phi3ForCausalLM",
            "Phi3Config",
            pad_token_id=None,
            sliding_window=5,
            **{
                **_QWEN2_SIZES,
                "rope_parameters": dict(
                    rope_type="default", rope_theta=500.0, partial_rotary_factor=0.75
                ),
            },
        ),
        config={**_LLAMA, "kv_channels": D, "rotary_percent": 0.75, "window_size": (4, 0)},
    ),
    "arcee": Peer(
        build=_random("ArceeForCausalLM", "ArceeConfig", **_LLAMA_SIZES),
        config={**_LLAMA, "swiglu": False, "squared_relu": True},
    ),
    "seed_oss": Peer(
        build=_random("SeedOssForCausalLM", "SeedOssConfig", **_LLAMA_SIZES),
        config={**_LLAMA, "add_qkv_bias": True},
    ),
    "ministral": Peer(
        build=_random(
            "MinistralForCausalLM",
            "MinistralConfig",
            **_LLAMA_SIZES,
            sliding_window=4,
            layer_types=["full_attention", "sliding_attention"],
        ),
        config={**_LLAMA, **_WINDOWS},
    ),
    # Every 4th layer has no window: the first of CWM, and the last of OLMo 3 and EXAONE 4.
    "cwm": Peer(
        build=_random("CwmForCausalLM", "CwmConfig", **_LLAMA_SIZES, sliding_window=4),
        config={**_LLAMA, **_WINDOWS},
    ),
    "olmo3": Peer(
        build=_random(
            "Olmo3ForCausalLM",
            "Olmo3Config",
            pad_token_id=None,
            sliding_window=4,
            **{
                **_QWEN2_SIZES,
                "num_hidden_layers": 4,
                "rope_parameters": dict(
                    full_attention=_YARN, sliding_attention=dict(rope_theta=500.0)
                ),
            },
        ),
        config={
            **_LLAMA,
            "num_layers": 4,
            "kv_channels": D,
            "norm_position": "after",
            "qk_layernorm": True,
            "qk_layernorm_scope": "all-heads",
            "window_size": (3, 0),
            "window_attn_skip_freq": 4,
            "rotary_base_local": 500,
            **_WITH_YARN,
        },
    ),
    "exaone4": Peer(
        build=_random(
            "Exaone4ForCausalLM",
            "Exaone4Config",
            sliding_window=4,
            **{**_LLAMA_SIZES, "num_hidden_layers": 4},
        ),
        config={
            **_LLAMA,
            "num_layers": 4,
            "norm_position": "after",
            "qk_layernorm": True,
            "window_size": (3, 0),
            "window_attn_skip_freq": 4,
            "no_rope_freq": 4,
        },
    ),
    "starcoder2": Peer(
        build=_random(
            "Starcoder2ForCausalLM",
            "Starcoder2Config",
            sliding_window=5,
            **{key: value for key, value in _QWEN2_SIZES.items() if key != "rms_norm_eps"},
        ),
        config={
            **_LLAMA,
            "kv_channels": D,
            "normalization": "LayerNorm",
            "norm_epsilon": 1e-5,
            "swiglu": False,
            "add_bias_linear": True,
            "window_size": (4, 0),
        },
    ),
    "stablelm": Peer(
        build=_random(
            "StableLmForCausalLM",
            "StableLmConfig",
            use_qkv_bias=True,
            **{
                **_QWEN2_SIZES,
                "rope_parameters": dict(
                    rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5
                ),
            },
        ),
        config={
            **_LLAMA,
            "kv_channels": D,
            "normalization": "LayerNorm",
            "norm_epsilon": 1e-5,
            "rotary_percent": 0.5,
            "add_qkv_bias": True,
        },
    ),
    "mixtral": Peer(
        build=_random("MixtralForCausalLM", "MixtralConfig", **_EXPERTS, num_local_experts=6),
        config={**_LLAMA, "num_experts": 6, "moe_router_topk": 3},
    ),
    "olmoe": Peer(
        build=_random("OlmoeForCausalLM", "OlmoeConfig", **_QWEN2_EXPERTS, num_experts=6),
        config={
            **_LLAMA,
            "kv_channels": D,
            "num_experts": 6,
            "moe_router_topk": 3,
            "moe_router_pre_softmax": True,
            "qk_layernorm": True,
            "qk_layernorm_scope": "all-heads",
        },
    ),
    # The first of two layers has a dense MLP, since decoder_sparse_step counts layers from 1.
    "qwen3_moe": Peer(
        build=_random(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            **_EXPERTS,
            num_experts=6,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            decoder_sparse_step=2,
        ),
        config={
            **_LLAMA,
            "num_experts": 6,
            "moe_router_topk": 3,
            "moe_ffn_hidden_size": 24,
            "moe_layer_freq": (0, 1),
            "qk_layernorm": True,
        },
    ),
    "flex_olmo": Peer(
        build=_random("FlexOlmoForCausalLM", "FlexOlmoConfig", **_QWEN2_EXPERTS, num_experts=6),
        config={
            **_LLAMA,
            **dict(kv_channels=D, num_experts=6, moe_router_topk=3, moe_router_pre_softmax=True),
            **dict(qk_layernorm=True, qk_layernorm_scope="all-heads", norm_position="after"),
        },
    ),
    "glm4_moe": Peer(
        build=_random(
            "Glm4MoeForCausalLM",
            "Glm4MoeConfig",
            **{**_EXPERTS, "head_dim": 8, "num_experts_per_tok": 4},
            **dict(n_routed_experts=8, n_shared_experts=2, moe_intermediate_size=12),
            **dict(n_group=4, topk_group=2, use_qk_norm=True, attention_bias=True),
            routed_scaling_factor=1.5,
        ),
        config={
            **_LLAMA,
            **dict(kv_channels=8, rotary_percent=0.5, qk_layernorm=True, add_qkv_bias=True),
            **dict(num_experts=8, moe_ffn_hidden_size=12, moe_shared_expert_intermediate_size=24),
            **dict(moe_router_topk=4, moe_layer_freq=(0, 1), moe_router_topk_scaling_factor=1.5),
            **dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
            **dict(moe_router_num_groups=4, moe_router_group_topk=2),
        },
    ),
    "solar_open": Peer(
        build=_random(
            "SolarOpenForCausalLM",
            "SolarOpenConfig",
            **{key: value for key, value in _EXPERTS.items() if key != "intermediate_size"},
            **dict(n_routed_experts=6, n_shared_experts=1, moe_intermediate_size=12),
            routed_scaling_factor=1.5,
        ),
        config={
            **_LLAMA,
            **dict(num_experts=6, moe_ffn_hidden_size=12, moe_shared_expert_intermediate_size=12),
            **dict(moe_router_topk=3, moe_router_score_function="sigmoid"),
            **dict(moe_router_enable_expert_bias=True, moe_router_topk_scaling_factor=1.5),
        },
    ),
    "granitemoe": Peer(
        build=_random(
            "GraniteMoeForCausalLM",
            "GraniteMoeConfig",
            **{**_QWEN2_EXPERTS, **_MULTIPLIERS},
            num_local_experts=6,
        ),
        config={
            **_LLAMA,
            **_MULTIPLIED,
            **dict(kv_channels=D, num_experts=6, moe_router_topk=3, logits_scaling=6.0),
        },
    ),
    "granitemoeshared": Peer(
        build=_random(
            "GraniteMoeSharedForCausalLM",
            "GraniteMoeSharedConfig",
            **{**_QWEN2_EXPERTS, **_MULTIPLIERS},
            **dict(num_local_experts=6, shared_intermediate_size=24),
        ),
        config={
            **_LLAMA,
            **_MULTIPLIED,
            **dict(kv_channels=D, num_experts=6, moe_router_topk=3, logits_scaling=6.0),
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "minimax_m2": Peer(
        build=_random(
            "MiniMaxM2ForCausalLM",
            "MiniMaxM2Config",
            num_local_experts=6,
            **{**_EXPERTS, "head_dim": 8, "rope_parameters": _GLM["rope_parameters"]},
        ),
        config={
            **_LLAMA,
            **dict(kv_channels=8, num_experts=6, moe_router_topk=3, rotary_percent=0.5),
            **dict(qk_layernorm=True, qk_layernorm_scope="all-heads"),
            **dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
        },
    ),
    "deepseek_v3": Peer(
        build=_random(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            **_DEEPSEEK,
            q_lora_rank=8,
            num_local_experts=8,
            n_group=4,
            topk_group=2,
            rope_parameters=dict(
                **dict(rope_type="yarn", rope_theta=500.0, factor=4.0),
                **dict(original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.7),
            ),
        ),
        config={
            **_LATENT,
            **dict(q_lora_rank=8, rope_type="yarn", rotary_scaling_factor=4.0),
            **dict(original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.7),
            **dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
            **dict(moe_router_num_groups=4, moe_router_group_topk=2),
        },
    ),
    "deepseek_v2": Peer(
        build=_random(
            "DeepseekV2ForCausalLM",
            "DeepseekV2Config",
            **_DEEPSEEK,
            q_lora_rank=None,
            rope_parameters=dict(rope_type="default", rope_theta=500.0),
        ),
        config={**_LATENT, "rope_type": "rope", "moe_router_pre_softmax": True},
    ),
    "qwen2_moe": Peer(
        build=_random(
            "Qwen2MoeForCausalLM",
            "Qwen2MoeConfig",
            **_QWEN2_EXPERTS,
            num_experts=6,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=20,
            mlp_only_layers=[1],
        ),
        config={
            **_LLAMA,
            "kv_channels": D,
            "add_qkv_bias": True,
            "num_experts": 6,
            "moe_router_topk": 3,
            "moe_router_pre_softmax": True,
            "moe_ffn_hidden_size": 24,
            "moe_layer_freq": (1, 0),
            "moe_shared_expert_intermediate_size": 20,
            "moe_shared_expert_gate": True,
        },
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
    ),
    "llama with biases of attention": Peer(
        build=_random("LlamaForCausalLM", "LlamaConfig", attention_bias=True, **_LLAMA_SIZES),
        config={**_LLAMA, "add_qkv_bias": True, "add_proj_bias": True},
    ),
    "granite": Peer(
        build=_random("GraniteForCausalLM", "GraniteConfig", **_LLAMA_SIZES, **_MULTIPLIERS),
        config={**_LLAMA, **_MULTIPLIED, "logits_scaling": 6.0},
    ),
    "hyperclovax": Peer(
        build=_random(
            "HyperCLOVAXForCausalLM",
            "HyperCLOVAXConfig",
            pad_token_id=None,
            attention_bias=True,
            **_LLAMA_SIZES,
            **_MULTIPLIERS,
        ),
        config={
            **_LLAMA,
            **_MULTIPLIED,
            **dict(logits_scaling=1 / 6, norm_position="both"),
            **dict(add_qkv_bias=True, add_proj_bias=True),
        },
    ),
    "helium": Peer(
        build=_random(
            "HeliumForCausalLM",
            "HeliumConfig",
            **{**_LLAMA_SIZES, "head_dim": D, "pad_token_id": None},
        ),
        config={**_LLAMA, "kv_channels": D},
    ),
    "ernie4_5": Peer(
        build=_random(
            "Ernie4_5ForCausalLM",
            "Ernie4_5Config",
            use_bias=True,
            pad_token_id=None,
            **_LLAMA_SIZES,
        ),
        config={**_LLAMA, "add_bias_linear": True},
    ),
    "glm": Peer(
        build=_random(
            "GlmForCausalLM", "GlmConfig", **{**_LLAMA_SIZES, **_GLM, "attention_bias": True}
        ),
        config={**_LLAMA, "kv_channels": D, "rotary_percent": 0.5, "add_qkv_bias": True},
    ),
    "glm4": Peer(
        build=_random(
            "Glm4ForCausalLM", "Glm4Config", **{**_LLAMA_SIZES, **_GLM, "attention_bias": False}
        ),
        config={**_LLAMA, "kv_channels": D, "rotary_percent": 0.5, "norm_position": "both"},
    ),
    "cohere": Peer(
        build=_random("CohereForCausalLM", "CohereConfig", logit_scale=0.3, **_COHERE_SIZES),
        config={**_COHERE, "logits_scaling": 1 / 0.3},
    ),
    "cohere2": Peer(
        build=_random(
            "Cohere2ForCausalLM",
            "Cohere2Config",
            attention_bias=True,
            sliding_window=4,
            layer_types=["full_attention", "sliding_attention"],
            **_COHERE_SIZES,
        ),
        config={
            **_COHERE,
            **_WINDOWS,
            **dict(logits_scaling=16.0, no_rope_freq=(1, 0)),
            **dict(add_qkv_bias=True, add_proj_bias=True),
        },
    ),
    "gemma": Peer(build=_random("GemmaForCausalLM", "GemmaConfig", **_GEMMA_SIZES), config=_GEMMA),
    "gemma3_text": Peer(
        build=_random(
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            sliding_window=4,
            query_pre_attn_scalar=10,
            final_logit_softcapping=1.5,
            layer_types=["full_attention", "sliding_attention"],
            **{
                **_GEMMA_SIZES,
                "rope_parameters": dict(
                    full_attention=dict(rope_type="linear", factor=8.0, rope_theta=500.0),
                    sliding_attention=dict(rope_type="default", rope_theta=100.0),
                ),
            },
        ),
        config={
            **_GEMMA,
            **_WINDOWS,
            **dict(norm_position="both", qk_layernorm=True, softmax_scale=10**-0.5),
            **dict(rotary_base_local=100, rotary_seq_len_interpolation_factor=8),
            **dict(final_logit_softcapping=1.5),
        },
    ),
    **{
        name: Peer(
            build=_random(
                f"{made}ForCausalLM",
                f"{made}Config",
                sliding_window=4,
                query_pre_attn_scalar=10,
                attn_logit_softcapping=0.7,
                final_logit_softcapping=1.5,
                layer_types=["full_attention", "sliding_attention"],
                **_GEMMA_SIZES,
            ),
            config={
                **_GEMMA,
                **_WINDOWS,
                **dict(norm_position=norms, softmax_scale=10**-0.5),
                **dict(attn_logit_softcapping=0.7, final_logit_softcapping=1.5),
            },
        )
        for name, made, norms in (
            ("gemma2", "Gemma2", "both"),
            ("vaultgemma", "VaultGemma", "before"),
        )
    },
    "jais2": Peer(
        build=_random(
            "Jais2ForCausalLM",
            "Jais2Config",
            **{key: value for key, value in _LLAMA_SIZES.items() if key != "rms_norm_eps"},
        ),
        config={
            **_LLAMA,
            **dict(swiglu=False, squared_relu=True, add_bias_linear=True),
            **dict(normalization="LayerNorm", norm_epsilon=1e-5),
        },
    ),
    "persimmon": Peer(
        build=_random("PersimmonForCausalLM", "PersimmonConfig", pad_token_id=None, **_NEOX),
        config={**_HALF_ROTATED, "squared_relu": True, "qk_layernorm": True},
    ),
    "internlm3": Peer(
        build=_of_type(
            "internlm3", pad_token_id=None, attention_bias=True, mlp_bias=True, **_LLAMA_SIZES
        ),
        config={**_LLAMA, "add_bias_linear": True},
    ),
    "iquestcoder": Peer(build=_of_type("iquestcoder", **_LLAMA_SIZES), config=_LLAMA),
    "gpt_bigcode": Peer(
        build=_random("GPTBigCodeForCausalLM", "GPTBigCodeConfig", **_GPT2_SIZES),
        config=dict(group_query_attention=True),
    ),
    "gpt_bigcode with all heads": Peer(
        build=_random(
            "GPTBigCodeForCausalLM", "GPTBigCodeConfig", multi_query=False, **_GPT2_SIZES
        ),
        config={},
    ),
    "falcon": Peer(
        build=_random(
            "FalconForCausalLM",
            "FalconConfig",
            hidden_size=H,
            num_hidden_layers=L,
            num_attention_heads=A,
            max_position_embeddings=POSITIONS,
            initializer_range=0.2,
        ),
        config=dict(
            ffn_hidden_size=4 * H,
            group_query_attention=True,
            position_embedding_type="rope",
            parallel_residual=True,
            shared_norm=True,
            add_bias_linear=False,
            bias_gelu_fusion=False,
        ),
    ),
    "llama with longer positions": _llama_of_rule(
        dict(rope_type="linear", factor=2.0), dict(rotary_seq_len_interpolation_factor=2)
    ),
    "llama with yarn": _llama_of_rule(_YARN, _WITH_YARN),
    # The sample is longer than the original length, so the second list counts.
    "phi3 with longrope": Peer(
        build=_random(
            "Phi3ForCausalLM",
            "Phi3Config",
            pad_token_id=None,
            original_max_position_embeddings=5,
            **{
                **_QWEN2_SIZES,
                "rope_parameters": dict(
                    rope_type="longrope",
                    rope_theta=500.0,
                    partial_rotary_factor=0.75,
                    short_factor=[1.0, 1.5, 2.0],
                    long_factor=[2.0, 3.0, 7.5],
                ),
            },
        ),
        config={
            **_LLAMA,
            "kv_channels": D,
            "rotary_percent": 0.75,
            "rope_type": "longrope",
            "rotary_scaling_factor": POSITIONS / 5,
            "original_max_position_embeddings": 5,
            "short_factor": (1.0, 1.5, 2.0),
            "long_factor": (2.0, 3.0, 7.5),
        },
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


def our_tensors(model: Any, theirs: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Returns the weights of a model of transformers, or its gradients, under our names.

    theirs: by the names of the model's parameters. transformers itself makes the names of files of
    them, which differ for experts.
    """
    family = model.config.model_type
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict={key: one.clone() for key, one in theirs.items()})
        stored = load_file(f"{folder}/model.safetensors")
    known = {known_name(family, name, has_base=True): tensor for name, tensor in stored.items()}
    names = [name for name in parameter_specs(config, V) if not is_buffer(name)]
    rows = {name: row_of(family, name, config) for name in names}
    return {
        name: LAYOUTS[row.layout].join([known[part] for part in row.theirs], config)
        for name, row in rows.items()
    }
