"""Facts of Hugging Face models that are not one key: heads, biases, windows, tying, activations.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lite.config.hf_values import KeyRule, value_of
from megatron_lite.config.json_text import shown
from megatron_lite.config.model import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def heads(*, default_groups: int | None = None, default_head: int | None = None) -> KeyRule:
    """Returns the rule of key/value heads and of the channels of a head.

    default_groups: g, if its key is missing. None: a, so that each head has a key of its own.
    default_head: d, if its key is missing. None: h / a.
    """

    def read(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
        number = fields["num_attention_heads"]
        missing = number if "num_key_value_heads" in config else default_groups or number
        groups = value_of(config, "num_key_value_heads", int, missing)
        if groups != number:
            fields |= dict(group_query_attention=True, num_query_groups=groups)
        head = value_of(config, "head_dim", int, None if "head_dim" in config else default_head)
        if head is not None:
            fields["kv_channels"] = head
        return []

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"num_key_value_heads": model.query_groups, "head_dim": model.head_dim}

    return KeyRule(read, write, ("num_key_value_heads", "head_dim"))


def tied(default: bool) -> KeyRule:
    """Returns the rule of tied embeddings. default: the value for a missing key."""

    def read(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
        is_tied = value_of(config, "tie_word_embeddings", bool, default)
        fields["untie_embeddings_and_output_weights"] = not is_tied
        return []

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"tie_word_embeddings": not model.untie_embeddings_and_output_weights}

    return KeyRule(read, write, ("tie_word_embeddings",))


def _read_biases(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
    attention = value_of(config, "attention_bias", bool, False)
    mlp = value_of(config, "mlp_bias", bool, False)
    if attention != mlp:
        raise ValueError(
            f"attention_bias {attention} with mlp_bias {mlp} has no counterpart: all linear layers "
            "have a bias here, or none"
        )
    fields["add_bias_linear"] = attention
    return []


def _write_biases(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}


BIASES = KeyRule(_read_biases, _write_biases, ("attention_bias", "mlp_bias"))


def window(*, default: int | None) -> KeyRule:
    """Returns the rule of a window that all layers have. default: it, if its key is missing."""

    def read(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
        missing = None if "sliding_window" in config else default
        size = value_of(config, "sliding_window", int, missing)
        kinds = config.get("layer_types")
        expected = [FULL if size is None else SLIDING] * fields["num_layers"]
        if kinds is not None and kinds != expected:
            raise ValueError(
                f"layer_types {shown(repr(kinds))} with sliding_window {size} has no counterpart: "
                "all layers of this family have the window, or none"
            )
        if size is not None:
            # The query's own token counts in a sliding window, and not in --window-size.
            fields["window_size"] = (size - 1, 0)
        return []

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": _tokens(model)}

    return KeyRule(read, write, ("sliding_window", "layer_types"))


def windows_of_layers(*, first: str | None, default: int | None) -> KeyRule:
    """Returns the rule of windows that some layers have.

    first: the key of the number of the first layer with a window; None: the layers without a rotary
        embedding have a window. A key layer_types overrides both.
    default: the window, if its key is missing.
    """

    def read(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
        number = fields["num_layers"]
        missing = None if "sliding_window" in config else default
        size = value_of(config, "sliding_window", int, missing)
        kinds = config.get("layer_types")
        if not value_of(config, "use_sliding_window", bool, False) or size is None:
            if isinstance(kinds, list) and SLIDING in kinds:
                raise ValueError(
                    f"layer_types has {SLIDING}, but use_sliding_window is false or sliding_window "
                    "is null: correct one of them"
                )
            return []
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != number:
                raise ValueError(f"layer_types must have an entry for each of {number} layers")
            other = [kind for kind in kinds if kind not in (SLIDING, FULL)]
            if other:
                raise ValueError(
                    f"layer_types {shown(repr(other[0]))} has no counterpart: only {SLIDING} and "
                    f"{FULL}"
                )
            have = [int(kind == SLIDING) for kind in kinds]
        elif first is not None:
            start = value_of(config, first, int, 28)
            have = [int(layer >= start) for layer in range(number)]
        else:
            rotated = config.get("no_rope_layers")
            every = value_of(config, "no_rope_layer_interval", int, 4)
            have = [
                1 - int(rotated[layer] if rotated else (layer + 1) % every != 0)
                for layer in range(number)
            ]
        if any(have):
            # The key counts the query's own token, and window_size the tokens before it alone.
            fields["window_size"] = (size - 1, 0)
            if not all(have):
                fields["window_attn_skip_freq"] = tuple(have)
        return []

    def write(model: ModelConfig) -> dict[str, Any]:
        have = [model.layer_window(layer) is not None for layer in range(model.num_layers)]
        found: dict[str, Any] = {
            "use_sliding_window": any(have),
            "sliding_window": _tokens(model),
            "layer_types": [SLIDING if one else FULL for one in have],
        }
        if first is not None:
            found[first] = have.index(True) if any(have) else model.num_layers
        return found

    keys = ("sliding_window", "use_sliding_window", "layer_types", "no_rope_layers")
    return KeyRule(read, write, (*keys, "no_rope_layer_interval", *([first] if first else [])))


def _tokens(model: ModelConfig) -> int | None:
    return None if model.window_size is None else model.window_size[0] + 1


def gelu(key: str, default: str) -> KeyRule:
    """Returns the rule of the key of an activation that is exact GELU or its tanh formula."""

    def read(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
        name = value_of(config, key, str, default)
        if name not in (*TANH_GELUS, "gelu"):
            raise ValueError(
                f"{key} {shown(repr(name))} has no counterpart: only "
                f"{', '.join((*TANH_GELUS, 'gelu'))}"
            )
        fields["bias_gelu_fusion"] = name != "gelu"
        return []

    def write(model: ModelConfig) -> dict[str, Any]:
        return {key: "gelu_new" if model.bias_gelu_fusion else "gelu"}

    return KeyRule(read, write, (key,))


def dropouts(default: float) -> KeyRule:
    """Returns the rule of two keys for the dropout of the residual stream."""

    def read(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
        resid, embd = (
            value_of(config, key, float, default) for key in ("resid_pdrop", "embd_pdrop")
        )
        if resid != embd:
            raise ValueError(
                f"resid_pdrop {resid} and embd_pdrop {embd} differ: there is one --hidden-dropout "
                "here"
            )
        fields["hidden_dropout"] = resid
        return []

    def write(model: ModelConfig) -> dict[str, Any]:
        return {"resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout}

    return KeyRule(read, write, ("resid_pdrop", "embd_pdrop"))


def _read_inner(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
    inner = value_of(config, "n_inner", int, None)
    if inner is not None:
        fields["ffn_hidden_size"] = inner
    return []


def _write_inner(model: ModelConfig) -> dict[str, Any]:
    return {"n_inner": None if model.ffn_size == 4 * model.hidden_size else model.ffn_size}


INNER = KeyRule(_read_inner, _write_inner, ("n_inner",))
