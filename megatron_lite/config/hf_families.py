"""The families of Hugging Face models that map exactly, and those that cannot, with the reason.

Each family has a table of the keys that become fields, and a table of the only value that other
keys may have. It also has the fields that all members have in common, rules for facts that are not
one key, and the names of its weights. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_lite.config.hf_rules import (
    Alike,
    FamilyKeys,
    FamilyTensors,
    Gelu,
    Groups,
    Key,
    Only,
    Rotary,
    TensorNames,
    Unrotated,
    Windows,
)

_SIZES = {
    "num_hidden_layers": Key("num_layers", int),
    "hidden_size": Key("hidden_size", int),
    "num_attention_heads": Key("num_attention_heads", int),
    "intermediate_size": Key("ffn_hidden_size", int),
    "max_position_embeddings": Key("max_position_embeddings", int),
}
_TIED = Key("untie_embeddings_and_output_weights", bool, True, inverted=True)
_UNTIED = _TIED._replace(default=False)
_EPSILON = Key("norm_epsilon", float, 1e-5)
_DROPOUT = Key("attention_dropout", float, 0.0)
_LLAMA_KEYS = {
    **_SIZES,
    "rms_norm_eps": _EPSILON._replace(default=1e-6),
    "attention_dropout": _DROPOUT,
    "head_dim": Key("kv_channels", int, None),
    "tie_word_embeddings": _UNTIED,
}
_NOT_QUANTIZED = {"quantization_config": Only((None,), "weights are trained in 16 or 32 bits")}
_SWIGLU = {"hidden_act": Only((None, "silu"), "the MLP of this family is SwiGLU, with SiLU")}
_WHOLE_HEAD = {
    "partial_rotary_factor": Only((1, 1.0, None), "the whole head is rotated in this family")
}
_PROJECTION = {
    "attention_bias": Only((False, None), "the projection has no bias here if the MLP has none")
}
_HALVES = {"rope_interleaved": Only((False, None), "halves of a head are rotated, not pairs")}
_LLAMA_ONLY = {**_SWIGLU, **_NOT_QUANTIZED, **_WHOLE_HEAD, **_HALVES}
_RMS = dict(position_embedding_type="rope", normalization="RMSNorm", swiglu=True)
_LLAMA_FIELDS = dict(**_RMS, add_bias_linear=False, hidden_dropout=0.0)
_BIASES = Alike(
    ("attention_bias", "mlp_bias"),
    "add_bias_linear",
    False,
    "all linear layers have a bias here, or none",
)


def _dropouts(default: float) -> Alike:
    reason = "there is one --hidden-dropout here"
    return Alike(("resid_pdrop", "embd_pdrop"), "hidden_dropout", default, reason)


_ATTENTION: dict[str, str | TensorNames] = {
    "self_attention.linear_qkv": TensorNames(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "by group"
    ),
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}
_GATED: dict[str, str | TensorNames] = {
    "mlp.linear_fc1": TensorNames(("mlp.gate_proj", "mlp.up_proj"), "stacked"),
    "mlp.linear_fc2": "mlp.down_proj",
}
_NORMS: dict[str, str | TensorNames] = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}


def _llama(modules: Mapping[str, str | TensorNames]) -> FamilyTensors:
    return FamilyTensors(
        "model",
        "lm_head",
        {"embedding.word_embeddings": "embed_tokens", "decoder.final_layernorm": "norm"},
        ("layers", modules),
    )


_LLAMA_TENSORS = _llama({**_NORMS, **_ATTENTION, **_GATED})

FAMILIES: Mapping[str, FamilyKeys] = {
    "gpt2": FamilyKeys(
        "GPT2LMHeadModel",
        {
            "n_layer": Key("num_layers", int),
            "n_embd": Key("hidden_size", int),
            "n_head": Key("num_attention_heads", int),
            "n_positions": Key("max_position_embeddings", int),
            "layer_norm_epsilon": _EPSILON,
            "attn_pdrop": _DROPOUT._replace(default=0.1),
            "n_inner": Key("ffn_hidden_size", int, None),
            "tie_word_embeddings": _TIED,
        },
        {
            "scale_attn_weights": Only((None, True), "scores are always divided by sqrt(d)"),
            "scale_attn_by_inverse_layer_idx": Only((None, False), "no layer scales its scores"),
            "reorder_and_upcast_attn": Only((None, False), "scores are not reordered"),
            "add_cross_attention": Only((None, False), "there is no cross attention"),
            **_NOT_QUANTIZED,
        },
        {},
        (_dropouts(0.1), Gelu("activation_function", "gelu_new")),
        FamilyTensors(
            "transformer",
            "lm_head",
            {
                "embedding.word_embeddings": "wte",
                "embedding.position_embeddings": "wpe",
                "decoder.final_layernorm": "ln_f",
            },
            (
                "h",
                {
                    "input_layernorm": "ln_1",
                    "self_attention.linear_qkv": TensorNames(("attn.c_attn",), "fused transposed"),
                    "self_attention.linear_proj": TensorNames(("attn.c_proj",), "transposed"),
                    "pre_mlp_layernorm": "ln_2",
                    "mlp.linear_fc1": TensorNames(("mlp.c_fc",), "transposed"),
                    "mlp.linear_fc2": TensorNames(("mlp.c_proj",), "transposed"),
                },
            ),
        ),
    ),
    "llama": FamilyKeys(
        "LlamaForCausalLM",
        _LLAMA_KEYS,
        _LLAMA_ONLY,
        _LLAMA_FIELDS,
        (Groups(), _BIASES, Rotary()),
        _LLAMA_TENSORS,
    ),
    "mistral": FamilyKeys(
        "MistralForCausalLM",
        _LLAMA_KEYS,
        _LLAMA_ONLY,
        _LLAMA_FIELDS,
        (Groups(8), Windows("all", 4096), Rotary()),
        _LLAMA_TENSORS,
    ),
    "qwen2": FamilyKeys(
        "Qwen2ForCausalLM",
        _LLAMA_KEYS,
        {**_LLAMA_ONLY, **_PROJECTION},
        {**_LLAMA_FIELDS, "add_qkv_bias": True},
        (Groups(32), Windows("max_window_layers", 4096), Rotary()),
        _LLAMA_TENSORS,
    ),
    "qwen3": FamilyKeys(
        "Qwen3ForCausalLM",
        {**_LLAMA_KEYS, "head_dim": Key("kv_channels", int, 128, null=None)},
        {**_LLAMA_ONLY, **_PROJECTION},
        {**_LLAMA_FIELDS, "qk_layernorm": True},
        (Groups(32), Windows("max_window_layers", 4096), Rotary()),
        _LLAMA_TENSORS,
    ),
    "smollm3": FamilyKeys(
        "SmolLM3ForCausalLM",
        {**_LLAMA_KEYS, "tie_word_embeddings": _TIED},
        _LLAMA_ONLY,
        _LLAMA_FIELDS,
        (Groups(4), _BIASES, Unrotated(), Windows("unrotated"), Rotary(2000000)),
        _LLAMA_TENSORS,
    ),
    "olmo2": FamilyKeys(
        "Olmo2ForCausalLM",
        {**_LLAMA_KEYS, "rms_norm_eps": _EPSILON},
        {**_LLAMA_ONLY, **_PROJECTION},
        {
            **_LLAMA_FIELDS,
            "norm_position": "after",
            "qk_layernorm": True,
            "qk_layernorm_scope": "all-heads",
        },
        (Groups(), Rotary()),
        _llama(
            {
                **_ATTENTION,
                **_GATED,
                "post_self_attn_layernorm": "post_attention_layernorm",
                "post_mlp_layernorm": "post_feedforward_layernorm",
            }
        ),
    ),
    "phi3": FamilyKeys(
        "Phi3ForCausalLM",
        {**_LLAMA_KEYS, "rms_norm_eps": _EPSILON},
        {**_SWIGLU, **_NOT_QUANTIZED, **_PROJECTION},
        dict(**_RMS, add_bias_linear=False),
        (Groups(), _dropouts(0.0), Windows("all"), Rotary(share="partial_rotary_factor")),
        _llama(
            {
                **_NORMS,
                "self_attention.linear_qkv": TensorNames(("self_attn.qkv_proj",), "fused"),
                "self_attention.linear_proj": "self_attn.o_proj",
                "mlp.linear_fc1": "mlp.gate_up_proj",
                "mlp.linear_fc2": "mlp.down_proj",
            }
        ),
    ),
    "gpt_neox": FamilyKeys(
        "GPTNeoXForCausalLM",
        {
            **_SIZES,
            "layer_norm_eps": _EPSILON,
            "attention_dropout": _DROPOUT,
            "tie_word_embeddings": _UNTIED,
            "hidden_dropout": Key("hidden_dropout", float, 0.0),
            "use_parallel_residual": Key("parallel_residual", bool, True),
        },
        {
            "attention_bias": Only((None, True), "every linear layer has a bias, or none"),
            **_NOT_QUANTIZED,
        },
        dict(position_embedding_type="rope"),
        (
            Gelu("hidden_act", "gelu"),
            Rotary(base="rotary_emb_base", share="rotary_pct", default_share=0.25),
        ),
        FamilyTensors(
            "gpt_neox",
            "embed_out",
            {
                "embedding.word_embeddings": "embed_in",
                "decoder.final_layernorm": "final_layer_norm",
            },
            (
                "layers",
                {
                    **_NORMS,
                    # head by head [q k v], as here if each head has its own group
                    "self_attention.linear_qkv": "attention.query_key_value",
                    "self_attention.linear_proj": "attention.dense",
                    "mlp.linear_fc1": "mlp.dense_h_to_4h",
                    "mlp.linear_fc2": "mlp.dense_4h_to_h",
                },
            ),
        ),
    ),
    "nemotron": FamilyKeys(
        "NemotronForCausalLM",
        {
            **_SIZES,
            "norm_eps": _EPSILON,
            "attention_dropout": _DROPOUT,
            "head_dim": Key("kv_channels", int, None),
            "tie_word_embeddings": _UNTIED,
        },
        {
            "hidden_act": Only((None, "relu2"), "the MLP of this family has squared ReLU"),
            **_NOT_QUANTIZED,
        },
        dict(
            position_embedding_type="rope",
            squared_relu=True,
            apply_layernorm_1p=True,
            hidden_dropout=0.0,
        ),
        (Groups(), _BIASES, Rotary(share="partial_rotary_factor", default_share=0.5)),
        _llama(
            {
                **_NORMS,
                **_ATTENTION,
                "mlp.linear_fc1": "mlp.up_proj",
                "mlp.linear_fc2": "mlp.down_proj",
            }
        ),
    ),
}
_EXPERTS = "it has a mixture of experts, which this project does not train"
_GEMMA = (
    "it multiplies embeddings by sqrt(hidden_size) and gates its MLP with tanh GELU, which no "
    "model here does"
)
REASONS: Mapping[str, str] = {
    "gemma": _GEMMA,
    "gemma2": f"{_GEMMA}; it also caps scores and logits with tanh and has norms before and after "
    "each branch",
    "gemma3": f"{_GEMMA}; it also has norms before and after each branch and two rotary bases",
    "gemma3_text": f"{_GEMMA}; it also has norms before and after each branch and two rotary bases",
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "deepseek_v2": _EXPERTS,
    "deepseek_v3": _EXPERTS,
    "gpt_oss": _EXPERTS,
    "phi": "its attention and its MLP share one norm, a layer here has two",
    "gptj": "its attention and its MLP share one norm, a layer here has two",
    "bloom": "it encodes positions by ALiBi, which a model here does not",
    "mpt": "it encodes positions by ALiBi, which a model here does not",
    "opt": "its MLP has ReLU, which a model here does not",
}
