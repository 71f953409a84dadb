"""The names of tensors in Hugging Face checkpoints, one table per family.

A row maps a module of this project to the modules there that hold its weight and bias, and names
the layout (hf_layouts.py). `*` is the number of a layer. The same row serves both directions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.hf_layouts import LAYOUTS

LAYER = "decoder.layers.*."


class Row(NamedTuple):
    """Modules that hold the parts of one module here, and the layout of their tensors."""

    theirs: tuple[str, ...]
    layout: str = "same"


class FamilyTensors(NamedTuple):
    """The tensors of one model_type.

    base: the prefix of all tensors but those of the head. Files of a model that was saved without
        its head lack it.
    head: the module of the untied output weight.
    modules: a row for each module of this project.
    """

    base: str
    head: str
    modules: Mapping[str, Row]


def _layers(prefix: str, modules: Mapping[str, Row | str]) -> dict[str, Row]:
    rows = {name: Row((row,)) if isinstance(row, str) else row for name, row in modules.items()}
    return {
        LAYER + name: Row(tuple(f"{prefix}.*.{part}" for part in row.theirs), row.layout)
        for name, row in rows.items()
    }


_ATTENTION: dict[str, Row | str] = {
    "self_attention.linear_qkv": Row(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "by group"
    ),
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}
_GATED: dict[str, Row | str] = {
    "mlp.linear_fc1": Row(("mlp.gate_proj", "mlp.up_proj"), "stacked"),
    "mlp.linear_fc2": "mlp.down_proj",
}
_NORMS: dict[str, Row | str] = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}


def _llama(*parts: Mapping[str, Row | str]) -> FamilyTensors:
    modules = {name: row for part in parts for name, row in part.items()}
    return FamilyTensors(
        "model",
        "lm_head",
        {
            "embedding.word_embeddings": Row(("model.embed_tokens",)),
            **_layers("model.layers", modules),
            "decoder.final_layernorm": Row(("model.norm",)),
        },
    )


_LLAMA = _llama(_NORMS, _ATTENTION, _GATED)
FAMILIES: Mapping[str, FamilyTensors] = {
    "gpt2": FamilyTensors(
        "transformer",
        "lm_head",
        {
            "embedding.word_embeddings": Row(("transformer.wte",)),
            "embedding.position_embeddings": Row(("transformer.wpe",)),
            **_layers(
                "transformer.h",
                {
                    "input_layernorm": "ln_1",
                    "self_attention.linear_qkv": Row(("attn.c_attn",), "fused transposed"),
                    "self_attention.linear_proj": Row(("attn.c_proj",), "transposed"),
                    "pre_mlp_layernorm": "ln_2",
                    "mlp.linear_fc1": Row(("mlp.c_fc",), "transposed"),
                    "mlp.linear_fc2": Row(("mlp.c_proj",), "transposed"),
                },
            ),
            "decoder.final_layernorm": Row(("transformer.ln_f",)),
        },
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
    "olmo2": _llama(
        _ATTENTION,
        _GATED,
        {
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        },
    ),
    "phi3": _llama(
        _NORMS,
        {
            "self_attention.linear_qkv": Row(("self_attn.qkv_proj",), "fused"),
            "self_attention.linear_proj": "self_attn.o_proj",
            "mlp.linear_fc1": "mlp.gate_up_proj",
            "mlp.linear_fc2": "mlp.down_proj",
        },
    ),
    "nemotron": _llama(
        _NORMS, _ATTENTION, {"mlp.linear_fc1": "mlp.up_proj", "mlp.linear_fc2": "mlp.down_proj"}
    ),
    "gpt_neox": FamilyTensors(
        "gpt_neox",
        "embed_out",
        {
            "embedding.word_embeddings": Row(("gpt_neox.embed_in",)),
            **_layers(
                "gpt_neox.layers",
                {
                    "input_layernorm": "input_layernorm",
                    # head by head [q k v], as here if each head has its own group
                    "self_attention.linear_qkv": "attention.query_key_value",
                    "self_attention.linear_proj": "attention.dense",
                    "pre_mlp_layernorm": "post_attention_layernorm",
                    "mlp.linear_fc1": "mlp.dense_h_to_4h",
                    "mlp.linear_fc2": "mlp.dense_4h_to_h",
                },
            ),
            "decoder.final_layernorm": Row(("gpt_neox.final_layer_norm",)),
        },
    ),
}
OUTPUT = "output_layer"
EMBEDDING = "embedding.word_embeddings.weight"
# Buffers that old versions of transformers saved: masks and frequencies, which are no weights.
BUFFERS = re.compile(
    r"\.(attn|attention)\.(bias|masked_bias)"
    r"|(^|\.)rotary_emb\.inv_freq"
    r"|\.rotary_emb\.(cos|sin)_cached"
)
# Newer names of a tensor, and the name under which it is known here.
RENAMED = {("gpt_neox", "lm_head.weight"): "embed_out.weight"}


def row_of(family: str, name: str) -> Row | None:
    """Returns the names of the tensors there that hold a parameter here, and their layout.

    Returns None if models of the family have no such parameter.
    """
    module, _, kind = name.rpartition(".")
    number = re.match(r"decoder\.layers\.(\d+)\.", module)
    table = FAMILIES[family]
    if module == OUTPUT:
        return Row((f"{table.head}.{kind}",))
    pattern = module if number is None else LAYER + module[number.end() :]
    row = table.modules.get(pattern)
    if row is None:
        return None
    layer = "" if number is None else number[1]
    return Row(tuple(f"{part.replace('*', layer)}.{kind}" for part in row.theirs), row.layout)


def known_name(family: str, name: str, *, has_base: bool) -> str:
    """Returns the name under which a tensor of a file is known here.

    has_base: whether the names in the files begin with the family's base, but for the head.
    """
    table = FAMILIES[family]
    name = RENAMED.get((family, name), name)
    if has_base or name == f"{table.head}.weight":
        return name
    return f"{table.base}.{name}"


def to_ours(
    family: str, theirs: Mapping[str, Tensor], names: Mapping[str, object], model: ModelConfig
) -> dict[str, Tensor]:
    """Returns weights, or gradients, of a model of transformers under the names here.

    names: the parameters of the model here.
    """
    known = {known_name(family, name, has_base=True): tensor for name, tensor in theirs.items()}
    found = {}
    for name in names:
        row = row_of(family, name)
        assert row is not None, (family, name)
        found[name] = LAYOUTS[row.layout].join([known[part] for part in row.theirs], model)
    return found
