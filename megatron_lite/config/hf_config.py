"""Maps a Hugging Face config.json to the fields of ModelConfig.

The families are GPT-2, Llama, Mistral, Qwen2 and Qwen3. The mapping is data: each family has a
table of the keys that become fields, a table of the only value that other keys may have, and the
fields that the whole family has. A value that has no counterpart raises ValueError with the reason.
Keys that change no size become notes. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_lite.config.json_text import shown


class HfModel(NamedTuple):
    """A mapped model. fields: those of ModelConfig. notes: what was not taken over, in words."""

    fields: dict[str, Any]
    vocab_size: int
    notes: tuple[str, ...]


class Key(NamedTuple):
    """A key of a config that becomes a field.

    default: the value if the key is missing; a key with REQUIRED must be there.
    """

    field: str
    kind: type
    default: Any


class Only(NamedTuple):
    """A key with the only values that can be mapped. reason: why others cannot."""

    values: tuple[Any, ...]
    reason: str


class Family(NamedTuple):
    """One model_type. further: completes the fields from the rest of the config."""

    keys: Mapping[str, Key]
    only: Mapping[str, Only]
    fields: Mapping[str, Any]
    further: Callable[[Mapping[str, Any], dict[str, Any]], list[str]]


REQUIRED = object()
# Keys that say nothing about sizes, besides those that begin with _.
NEUTRAL = frozenset(
    (
        *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version"),
        *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"),
        *("initializer_range", "output_attentions", "output_hidden_states", "return_dict"),
        *("pretraining_tp", "auto_map", "id2label", "label2id", "task_specific_params"),
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
        *("summary_type", "summary_use_proj", "n_ctx", "num_labels", "gradient_checkpointing"),
        *("keys_to_ignore_at_inference", "name_or_path", "attn_implementation"),
        *("rope_interleaved", "layer_types"),
    )
)
# Keys that the functions of the families read.
FURTHER = frozenset(
    (
        *("vocab_size", "rope_scaling", "rope_parameters", "rope_theta", "sliding_window"),
        *("use_sliding_window", "max_window_layers", "num_key_value_heads", "head_dim"),
        *("attention_bias", "mlp_bias", "tie_word_embeddings", "n_inner", "resid_pdrop"),
        *("embd_pdrop", "activation_function"),
    )
)


def _heads(config: Mapping[str, Any], fields: dict[str, Any]) -> None:
    groups = _value(config, "num_key_value_heads", int, fields["num_attention_heads"])
    if groups != fields["num_attention_heads"]:
        fields |= dict(group_query_attention=True, num_query_groups=groups)
    head = _value(config, "head_dim", int, None)
    if head is not None:
        fields["kv_channels"] = head


def _rotary(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
    """Sets the base of the rotary embedding. Returns a note if it is scaled."""
    inside = config.get("rope_parameters") or {}
    if not isinstance(inside, Mapping):
        raise ValueError(f"rope_parameters must be an object (got {shown(repr(inside))})")
    base = inside.get("rope_theta", config.get("rope_theta", 10000))
    if isinstance(base, bool) or not isinstance(base, (int, float)) or base != int(base):
        raise ValueError(f"rope_theta must be a whole number (got {shown(repr(base))})")
    fields["rotary_base"] = int(base)
    scaling = config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"rope_scaling must be an object (got {shown(repr(scaling))})")
    kind = scaling.get("rope_type", scaling.get("type")) or inside.get("rope_type")
    if kind in (None, "default"):
        return []
    return [
        f"rope_scaling {shown(repr(kind))} is left out: it changes no size, but a run here does "
        "not scale its rotary embedding"
    ]


def _llama(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
    _heads(config, fields)
    attention = _value(config, "attention_bias", bool, False)
    mlp = _value(config, "mlp_bias", bool, False)
    if attention != mlp:
        raise ValueError(
            f"attention_bias {attention} with mlp_bias {mlp} has no counterpart: all linear layers "
            "have a bias here, or none"
        )
    fields["add_bias_linear"] = attention
    fields["untie_embeddings_and_output_weights"] = not _value(
        config, "tie_word_embeddings", bool, False
    )
    return _rotary(config, fields)


def _mistral(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
    window = _value(config, "sliding_window", int, None)
    if window is not None:
        # The query's own token counts in a sliding window, and not in --window-size.
        fields["window_size"] = (window - 1, 0)
    return _llama(config, fields)


def _qwen2(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
    notes = _qwen3(config, fields)
    fields["add_qkv_bias"] = True
    return notes


def _qwen3(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
    if _value(config, "attention_bias", bool, False):
        raise ValueError("attention_bias true has no counterpart: the projection has no bias here")
    if _value(config, "use_sliding_window", bool, False):
        window = _value(config, "sliding_window", int, None)
        first = _value(config, "max_window_layers", int, fields["num_layers"])
        if window is not None and first < fields["num_layers"]:
            fields["window_size"] = (window - 1, 0)
            fields["window_attn_skip_freq"] = tuple(
                int(layer >= first) for layer in range(fields["num_layers"])
            )
    return _llama(config, fields)


def _gpt2(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
    inner = _value(config, "n_inner", int, None)
    if inner is not None:
        fields["ffn_hidden_size"] = inner
    dropouts = {name: _value(config, name, float, 0.1) for name in ("resid_pdrop", "embd_pdrop")}
    if len(set(dropouts.values())) > 1:
        raise ValueError(
            f"resid_pdrop {dropouts['resid_pdrop']} and embd_pdrop {dropouts['embd_pdrop']} "
            "differ: there is one --hidden-dropout here"
        )
    fields["hidden_dropout"] = dropouts["resid_pdrop"]
    activation = _value(config, "activation_function", str, "gelu_new")
    tanh = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False}
    if activation not in tanh:
        raise ValueError(
            f"activation_function {shown(repr(activation))} has no counterpart: only "
            f"{', '.join(tanh)}"
        )
    fields["bias_gelu_fusion"] = tanh[activation]
    fields["untie_embeddings_and_output_weights"] = not _value(
        config, "tie_word_embeddings", bool, True
    )
    return []


_LLAMA_KEYS = {
    "num_hidden_layers": Key("num_layers", int, REQUIRED),
    "hidden_size": Key("hidden_size", int, REQUIRED),
    "num_attention_heads": Key("num_attention_heads", int, REQUIRED),
    "intermediate_size": Key("ffn_hidden_size", int, REQUIRED),
    "max_position_embeddings": Key("max_position_embeddings", int, REQUIRED),
    "rms_norm_eps": Key("norm_epsilon", float, 1e-6),
    "attention_dropout": Key("attention_dropout", float, 0.0),
}
_LLAMA_ONLY = {
    "hidden_act": Only((None, "silu"), "the MLP of this family is SwiGLU, with SiLU"),
    "quantization_config": Only((None,), "weights are trained in 16 or 32 bits"),
    "partial_rotary_factor": Only((None, 1, 1.0), "the whole head is rotated in this family"),
}
_LLAMA_FIELDS = dict(
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    hidden_dropout=0.0,
)
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        {
            "n_layer": Key("num_layers", int, REQUIRED),
            "n_embd": Key("hidden_size", int, REQUIRED),
            "n_head": Key("num_attention_heads", int, REQUIRED),
            "n_positions": Key("max_position_embeddings", int, REQUIRED),
            "layer_norm_epsilon": Key("norm_epsilon", float, 1e-5),
            "attn_pdrop": Key("attention_dropout", float, 0.1),
        },
        {
            "scale_attn_weights": Only((None, True), "scores are always divided by sqrt(d)"),
            "scale_attn_by_inverse_layer_idx": Only((None, False), "no layer scales its scores"),
            "reorder_and_upcast_attn": Only((None, False), "scores are not reordered"),
            "add_cross_attention": Only((None, False), "there is no cross attention"),
            "quantization_config": Only((None,), "weights are trained in 16 or 32 bits"),
        },
        {},
        _gpt2,
    ),
    "llama": Family(_LLAMA_KEYS, _LLAMA_ONLY, _LLAMA_FIELDS, _llama),
    "mistral": Family(_LLAMA_KEYS, _LLAMA_ONLY, _LLAMA_FIELDS, _mistral),
    "qwen2": Family(_LLAMA_KEYS, _LLAMA_ONLY, _LLAMA_FIELDS, _qwen2),
    "qwen3": Family(_LLAMA_KEYS, _LLAMA_ONLY, {**_LLAMA_FIELDS, "qk_layernorm": True}, _qwen3),
}


def from_hf(config: Any) -> HfModel:
    """Returns the model that a parsed config.json describes.

    Raises ValueError if the model_type is not known, if a key is missing or has the wrong type, or
    if a value has no counterpart.
    """
    if not isinstance(config, Mapping):
        raise ValueError("a config.json is an object")
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"model_type {shown(repr(name))} has no counterpart here, only {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    fields = dict(family.fields)
    for key, entry in family.keys.items():
        fields[entry.field] = _value(config, key, entry.kind, entry.default)
    for key, rule in family.only.items():
        if config.get(key) not in rule.values:
            raise ValueError(f"{key} {shown(repr(config[key]))} has no counterpart: {rule.reason}")
    vocab_size = _value(config, "vocab_size", int, REQUIRED)
    notes = family.further(config, fields)
    unread = [
        key
        for key in config
        if key not in family.keys.keys() | family.only.keys() | NEUTRAL | FURTHER
        and not str(key).startswith("_")
    ]
    if unread:
        notes.append(f"keys that are not read: {shown(', '.join(map(str, unread)))}")
    return HfModel(fields, vocab_size, tuple(notes))


def _value(config: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """Returns a value of the config with its type checked. null counts as missing."""
    value = config.get(key)
    if value is None:
        if default is REQUIRED:
            raise ValueError(f"{key} is missing")
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{key} must be of type {kind.__name__} (got {shown(repr(value))})")
    return value
