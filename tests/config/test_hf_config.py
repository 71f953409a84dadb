"""Published config.json files: what they become, and what has no counterpart."""

import json
from pathlib import Path

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.config.hf_config import from_hf, meaning_of, read_hf_file, to_hf
from megatron_lite.config.model import ModelConfig
from megatron_lite.memory.predict.states import parameter_count

GPT2 = """{
  "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
  "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
  "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
  "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null,
  "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
  "summary_use_proj": true,
  "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
  "vocab_size": 50257
}"""
LLAMA_3_8B = """{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
  "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192,
  "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
  "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.40.0.dev0", "use_cache": true, "vocab_size": 128256
}"""
MISTRAL_7B = """{
  "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
  "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
  "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0",
  "use_cache": true, "vocab_size": 32000
}"""
QWEN2_0_5B = """{
  "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
  "intermediate_size": 4864, "max_position_embeddings": 131072, "max_window_layers": 24,
  "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
  "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
  "sliding_window": 131072, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers_version": "4.40.1", "use_cache": true, "use_sliding_window": false,
  "vocab_size": 151936
}"""
QWEN3_0_6B = """{
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
  "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
  "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
  "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
  "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
  "use_cache": true, "use_sliding_window": false, "vocab_size": 151936
}"""
# The published number of parameters of each checkpoint.
PARAMETERS = {
    GPT2: 124_439_808,
    LLAMA_3_8B: 8_030_261_248,
    MISTRAL_7B: 7_241_732_096,
    QWEN2_0_5B: 494_032_768,
    QWEN3_0_6B: 596_049_920,
}


def changed(text, **values):
    return {**json.loads(text), **values}


@pytest.mark.parametrize("text", PARAMETERS)
def test_a_published_config_has_the_published_number_of_parameters(text):
    model = from_hf(changed(text))
    assert parameter_count(ModelConfig(**model.fields), model.vocab_size) == PARAMETERS[text]
    assert model.notes == ()


def test_layer_types_may_repeat_the_window_of_every_layer():
    config = changed(MISTRAL_7B, layer_types=["sliding_attention"] * 32)
    assert from_hf(config) == from_hf(changed(MISTRAL_7B))


SMALL = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=61,
    max_position_embeddings=16384,
)  # fmt: skip
SMOLLM3 = changed(
    LLAMA_3_8B, model_type="smollm3", num_hidden_layers=4, no_rope_layer_interval=3, rope_theta=1e4
)


def test_an_interval_of_unrotated_layers_need_not_divide_the_layers():
    model = ModelConfig(**from_hf(SMOLLM3).fields)
    assert [model.layer_rotates(layer) for layer in range(4)] == [True, True, False, True]


def test_what_changes_no_size_becomes_a_note():
    scaled = changed(LLAMA_3_8B, rope_scaling={"rope_type": "dynamic", "factor": 8.0}, new_key=1)
    model = from_hf({**scaled, "eos_token_id": [7, 128256]})
    scaling, unread, beyond = model.notes
    assert (
        "rope_scaling 'dynamic', which depends on the length" in scaling
        and "not read: new_key" in unread
        and "eos_token_id [7, 128256] lies" in beyond
    )
    assert model.inexact == (scaling,)


# Each row: a config above or none, what is changed in it or the config itself, and the reason.
REFUSED = json.loads(Path(__file__).with_name("hf_refused.json").read_text())
BASES = dict(gpt2=GPT2, llama=LLAMA_3_8B, qwen2=QWEN2_0_5B)


@pytest.mark.parametrize("base, change, reason", REFUSED)
def test_what_has_no_counterpart_is_refused_with_the_reason(base, change, reason):
    with pytest.raises(ValueError, match=reason):
        from_hf(changed(BASES[base], **change) if base else change)


@pytest.mark.parametrize(
    "text, fields",
    [
        (LLAMA_3_8B, dict(bias_gelu_fusion=False)),
        (LLAMA_3_8B, dict(fp32_residual_connection=True)),
        (LLAMA_3_8B, dict(add_bias_linear=True, add_qkv_bias=True)),
        (GPT2, dict(use_rope_scaling=True)),
        (GPT2, dict(add_qkv_bias=True)),
    ],
)
def test_a_setting_without_effect_on_the_model_changes_no_export(text, fields):
    """A run of Megatron-LM with SwiGLU has bias_gelu_fusion = False, for example."""
    model = ModelConfig(**{**from_hf(changed(text)).fields, **fields})
    plain = {name: value for name, value in fields.items() if name == "add_bias_linear"}
    expected = ModelConfig(**{**from_hf(changed(text)).fields, **plain})
    assert to_hf(model, 61) == to_hf(expected, 61)


@pytest.mark.parametrize("scales", [{}, {"mscale": 0.7, "mscale_all_dim": 0.9}])
def test_yarn_of_latent_attention_is_exported_with_and_without_its_scales(scales):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, **scales}
    config = {**SMALL, "model_type": "deepseek_v3", "rope_scaling": scaling}
    model = ModelConfig(**from_hf(config).fields)
    again = ModelConfig(**from_hf(to_hf(model, 61, "deepseek_v3")).fields)
    assert meaning_of(again) == meaning_of(model)


LLAMA_3_2 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "values",
    [
        dict(rope_scaling=LLAMA_3_2, rope_theta=10000.0),
        dict(rope_parameters={**LLAMA_3_2, "rope_theta": 10000.0}, rope_theta=None),
        dict(rope_scaling={**LLAMA_3_2, "rope_theta": 10000.0}, rope_theta=None),
        dict(
            rope_scaling={**LLAMA_3_2, "type": "llama3"},
            rope_parameters={**LLAMA_3_2, "rope_theta": 10000},
            rope_theta=10000,
        ),
        dict(
            rope_scaling={**LLAMA_3_2, "original_max_position_embeddings": 1},
            original_max_position_embeddings=8192,
            rope_theta=10000.0,
        ),
    ],
)
def test_every_spelling_of_a_rotary_embedding_is_read(values):
    fields = from_hf(changed(LLAMA_3_8B, **values)).fields
    assert (fields["rotary_base"], fields["rope_scaling_factor"]) == (10000, 32.0)
    assert fields["use_rope_scaling"]


@pytest.mark.parametrize(
    "family, outside, counts", [("llama", 64, 64), ("phi3", None, 4096), ("olmo3", 64, 8)]
)
def test_the_length_that_counts_is_that_of_transformers(family, outside, counts):
    """The one inside of the object counts where there is one for each kind of layer."""
    key, inside = "original_max_position_embeddings", {"rope_type": "longrope", "factor": 4.0}
    lists = {"short_factor": [], "long_factor": []}
    rotary = {"model_type": family, key: outside, "rope_scaling": {**inside, **lists, key: 8}}
    assert from_hf(changed(LLAMA_3_8B, **rotary)).fields[key] == counts


def test_biases_everywhere_are_one_setting():
    config = changed(LLAMA_3_8B, attention_bias=True, mlp_bias=True)
    assert not from_hf(config).fields["add_proj_bias"]


def test_a_missing_file_is_named_with_what_to_do(tmp_path):
    for path, named in ((tmp_path / "gone", "hf download"), (tmp_path, "/config.json: cannot be")):
        with pytest.raises(InputError, match=named):
            read_hf_file(path)
