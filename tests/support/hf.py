"""Randomly initialised models of transformers, and our configs of them.

The library maps their configs (config/hf_config.py) and weights (convert/hf.py); transformers' own
logits and gradients check both mappings.
"""

import json
from copy import deepcopy
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from megatron_lite.config.hf_config import from_hf
from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.hf import RENAMED, row_of
from megatron_lite.convert.weights import is_buffer, parameter_specs

# D = H / A: transformers' GPT-2 and GPT-NeoX know no other
V, H, F, A, G, L, D, POSITIONS = 61, 32, 40, 4, 2, 2, 8, 17


def _random(name, *, model_class="", **config):
    """Returns a function that builds a model of a family. model_class: that of another family."""

    def build():
        transformers = pytest.importorskip("transformers")
        if name not in transformers.CONFIG_MAPPING:  # that of Python 3.10 lacks two
            pytest.skip(name)
        torch.manual_seed(11)
        settings = transformers.AutoConfig.for_model(
            name,
            vocab_size=V,
            attn_implementation="eager",
            pad_token_id=None,
            **deepcopy(config),  # some change it
        )
        model = (
            getattr(transformers, model_class)(settings)
            if model_class
            else transformers.AutoModelForCausalLM.from_config(settings)
        )
        for parameter_name, parameter in model.named_parameters():  # zeros and ones hide mistakes
            if parameter.dim() == 1:
                is_norm = "norm" in parameter_name and parameter_name.endswith("weight")
                nn.init.normal_(parameter, float(is_norm), 0.3)
        return model.eval()

    return build


def _without(sizes, key):
    return {name: value for name, value in sizes.items() if name != key}


def _rope(rotated=None, **rule):
    """Returns the rotary embedding of a config. rotated: the share of a head."""
    share = {} if rotated is None else {"partial_rotary_factor": rotated}
    return {"rope_parameters": dict(rope_type="default", rope_theta=500.0) | share | rule}


_SIZES = dict(
    hidden_size=H,
    intermediate_size=F,
    num_hidden_layers=L,
    num_attention_heads=A,
    max_position_embeddings=POSITIONS,
    initializer_range=0.2,
)
_LLAMA_SIZES = dict(
    _SIZES,
    num_key_value_heads=G,
    head_dim=6,
    tie_word_embeddings=False,
    **_rope(),
    rms_norm_eps=1e-4,
)


_QWEN2_SIZES = _without(_LLAMA_SIZES, "head_dim")
_LATENT = dict(
    _SIZES,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
    num_key_value_heads=A,
    tie_word_embeddings=False,
)
_DEEPSEEK = dict(
    _LATENT,
    n_routed_experts=8,
    n_shared_experts=2,
    moe_intermediate_size=12,
    num_experts_per_tok=4,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
)
_GROUPS = dict(n_group=4, topk_group=2)
_SHARED = dict(n_shared_experts=2, moe_intermediate_size=12, routed_scaling_factor=1.5)
_EXPERTS = dict(_LLAMA_SIZES, num_experts_per_tok=3)
_QWEN2_EXPERTS = dict(_QWEN2_SIZES, num_experts_per_tok=3)


_NEOX = dict(_SIZES, tie_word_embeddings=False, **_rope(0.5, rope_theta=10000.0))
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)
_BY_LAYER = dict(
    full_attention=dict(rope_type="linear", factor=8.0, rope_theta=500.0),
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
)
_GPT2_SIZES = dict(
    n_embd=H, n_inner=F, n_layer=L, n_head=A, n_positions=POSITIONS, initializer_range=0.2
)
_MULTIPLIERS = dict(
    embedding_multiplier=3.0, residual_multiplier=0.22, logits_scaling=6.0, attention_multiplier=0.3
)
_GLM = dict(head_dim=D, **_rope(0.5))
_LAST_WINDOWED = dict(sliding_window=4, layer_types=["full_attention", "sliding_attention"])
_COHERE_SIZES = dict(_without(_QWEN2_SIZES, "rms_norm_eps"), layer_norm_eps=1e-4)
_GEMMA_SIZES = dict(_LLAMA_SIZES, tie_word_embeddings=True)

_CONFIGS = {
    "gpt2": _GPT2_SIZES,
    "llama": _LLAMA_SIZES,
    "qwen2": _QWEN2_SIZES,
    "qwen3": _LLAMA_SIZES,
    # In transformers a window of 4 tokens includes the query's own token. The layers from number
    # max_window_layers on have a window.
    "mistral": dict(sliding_window=4, **_LLAMA_SIZES),
    "qwen2 with windows": dict(
        use_sliding_window=True, sliding_window=4, max_window_layers=1, **_QWEN2_SIZES
    ),
    # In transformers no_rope_layers is 1 for a layer that does use rotary embeddings.
    "smollm3": dict(
        no_rope_layers=[1, 0],
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        **_QWEN2_SIZES,
    ),
    "gpt_neox": dict(_NEOX, use_parallel_residual=False),
    "gpt_neox with a parallel residual": _NEOX,
    "nemotron": dict(_NEOX, num_key_value_heads=G, head_dim=D),
    "olmo2": _QWEN2_SIZES,
    "phi3": dict(sliding_window=5, **_QWEN2_SIZES | _rope(0.75)),
    "arcee": _LLAMA_SIZES,
    "seed_oss": _LLAMA_SIZES,
    "ministral": dict(_LLAMA_SIZES, **_LAST_WINDOWED),
    # Every 4th layer has no window: the first of CWM, and the last of OLMo 3 and EXAONE 4.
    "cwm": dict(_LLAMA_SIZES, sliding_window=4),
    "olmo3": dict(
        _QWEN2_SIZES,
        sliding_window=4,
        num_hidden_layers=4,
        rope_parameters=dict(
            full_attention=_rope(**_YARN)["rope_parameters"],
            sliding_attention=dict(rope_theta=500.0),
        ),
    ),
    "exaone4": dict(_LLAMA_SIZES, sliding_window=4, num_hidden_layers=4),
    "starcoder2": dict(sliding_window=5, **_without(_QWEN2_SIZES, "rms_norm_eps")),
    "stablelm": dict(use_qkv_bias=True, **_QWEN2_SIZES | _rope(0.5)),
    "mixtral": dict(_EXPERTS, num_local_experts=6),
    "olmoe": dict(_QWEN2_EXPERTS, num_experts=6, head_dim=D),
    "flex_olmo": dict(_QWEN2_EXPERTS, num_experts=6),
    "glm4_moe": dict(
        _EXPERTS,
        head_dim=8,
        num_experts_per_tok=4,
        **_SHARED,
        **_GROUPS,
        n_routed_experts=8,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "solar_open": dict(
        **_without(_EXPERTS, "intermediate_size"),
        n_routed_experts=6,
        n_shared_experts=1,
        moe_intermediate_size=12,
        routed_scaling_factor=1.5,
    ),
    "dots1": dict(
        _EXPERTS,
        num_experts_per_tok=4,
        **_SHARED,
        **_GROUPS,
        n_routed_experts=8,
        attention_bias=True,
        norm_topk_prob=True,
        sliding_window=4,
        max_window_layers=1,
        first_k_dense_replace=1,
    ),
    "mellum": dict(
        _EXPERTS,
        rope_parameters=_BY_LAYER,
        num_experts=6,
        moe_intermediate_size=24,
        sliding_window=4,
        mlp_layer_types=["dense", "sparse"],
        layer_types=["sliding_attention", "full_attention"],
    ),
    "exaone_moe": dict(
        _EXPERTS,
        num_experts_per_tok=4,
        num_hidden_layers=4,
        num_experts=8,
        num_shared_experts=2,
        moe_intermediate_size=12,
        sliding_window=4,
        **_GROUPS,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
    ),
    "hy_v3": dict(
        _EXPERTS, num_experts=6, num_shared_experts=2, moe_intermediate_size=12, attention_bias=True
    ),
    "glm4_moe_lite": dict(_DEEPSEEK, q_lora_rank=8, rms_norm_eps=1e-4, **_GROUPS),
    "youtu": dict(_LATENT, q_lora_rank=8),
    "granitemoehybrid": dict(
        _QWEN2_SIZES,
        **_MULTIPLIERS,
        num_local_experts=0,
        shared_intermediate_size=24,
        position_embedding_type="rope",
        layer_types=["attention"] * L,
        mamba_n_heads=8,
    ),
    "granitemoe": dict(_QWEN2_EXPERTS, **_MULTIPLIERS, num_local_experts=6),
    "granitemoeshared": dict(
        _QWEN2_EXPERTS, **_MULTIPLIERS, num_local_experts=6, shared_intermediate_size=24
    ),
    "minimax_m2": dict(_EXPERTS, num_local_experts=6, **_GLM),
    # The first of two layers has a dense MLP, since decoder_sparse_step counts layers from 1.
    "qwen3_moe": dict(
        _EXPERTS,
        num_experts=6,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    "deepseek_v3": dict(
        _DEEPSEEK,
        q_lora_rank=8,
        num_local_experts=8,
        **_GROUPS,
        **_rope(**_YARN, mscale=1.0, mscale_all_dim=0.7),
    ),
    "deepseek_v2": dict(_DEEPSEEK, q_lora_rank=None, **_rope()),
    "deepseek_v2, groups": dict(
        _DEEPSEEK, **_rope(), q_lora_rank=8, topk_method="group_limited_greedy", **_GROUPS
    ),
    "qwen2_moe": dict(
        _QWEN2_EXPERTS,
        num_experts=6,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
        mlp_only_layers=[1],
    ),
    # At this base one of the three frequencies is fast, one is between, and one is slow.
    "llama 3.1": dict(
        **_LLAMA_SIZES
        | _rope(
            rope_type="llama3",
            rope_theta=2.6e8,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
    ),
    "llama with biases of attention": dict(attention_bias=True, **_LLAMA_SIZES),
    "granite": dict(_LLAMA_SIZES, **_MULTIPLIERS),
    "hyperclovax": dict(attention_bias=True, **_LLAMA_SIZES, **_MULTIPLIERS),
    "helium": dict(_LLAMA_SIZES, head_dim=D),
    "ernie4_5": dict(use_bias=True, **_LLAMA_SIZES),
    "glm": dict(_LLAMA_SIZES, **_GLM, attention_bias=True),
    "glm4": dict(_LLAMA_SIZES, **_GLM, attention_bias=False),
    "cohere": dict(logit_scale=0.3, **_COHERE_SIZES),
    "cohere2": dict(attention_bias=True, **_LAST_WINDOWED, **_COHERE_SIZES),
    "gemma": _GEMMA_SIZES,
    "gemma3_text": dict(
        _LAST_WINDOWED,
        query_pre_attn_scalar=10,
        final_logit_softcapping=1.5,
        **_GEMMA_SIZES | {"rope_parameters": _BY_LAYER},
    ),
    **{
        name: dict(
            **_LAST_WINDOWED,
            query_pre_attn_scalar=10,
            attn_logit_softcapping=0.7,
            final_logit_softcapping=1.5,
            **_GEMMA_SIZES,
        )
        for name in ("gemma2", "vaultgemma")
    },
    "jais2": _without(_LLAMA_SIZES, "rms_norm_eps"),
    "persimmon": _NEOX,
    "internlm3": dict(
        model_class="LlamaForCausalLM", attention_bias=True, mlp_bias=True, **_LLAMA_SIZES
    ),
    "iquestcoder": dict(model_class="LlamaForCausalLM", **_LLAMA_SIZES),
    "gpt_bigcode": _GPT2_SIZES,
    "gpt_bigcode with all heads": dict(multi_query=False, **_GPT2_SIZES),
    "falcon": _without(_SIZES, "intermediate_size"),
    "llama with longer positions": _LLAMA_SIZES | _rope(rope_type="linear", factor=2.0),
    "llama with yarn": _LLAMA_SIZES | _rope(**_YARN),
    # The sample is longer than the original length, so the second list counts.
    "phi3 with longrope": dict(
        original_max_position_embeddings=5,
        **_QWEN2_SIZES
        | _rope(
            0.75, rope_type="longrope", short_factor=[1.0, 1.5, 2.0], long_factor=[2.0, 3.0, 7.5]
        ),
    ),
}
PEERS = {
    name: _random(name.replace(",", " ").split()[0], **config) for name, config in _CONFIGS.items()
}


def our_config(model):
    """Returns our config of a model of transformers, from its config.json."""
    mapped = from_hf(json.loads(model.config.to_json_string()))
    assert mapped.vocab_size == V and mapped.inexact == ()
    return ModelConfig(**{**mapped.fields, "hidden_dropout": 0.0, "attention_dropout": 0.0})


def our_tensors(model, theirs, config):
    """Returns the weights of a model of transformers, or its gradients, under our names.

    theirs: by the names of the model's parameters. transformers itself makes the names of files of
    them, which differ for experts.
    """
    family = model.config.model_type
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict={key: one.clone() for key, one in theirs.items()})
        stored = load_file(f"{folder}/model.safetensors")
    known = {RENAMED.get((family, name), name): tensor for name, tensor in stored.items()}
    names = [name for name in parameter_specs(config, V) if not is_buffer(name)]
    rows = {name: row_of(family, name, config) for name in names}
    return {name: row.join([known[part] for part in row.theirs]) for name, row in rows.items()}
