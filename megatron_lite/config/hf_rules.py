"""The rules from which a family of Hugging Face models is described.

A family maps a config.json to the fields of ModelConfig and back. The same description serves both
directions. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_lite.config.layer_pattern import marks
from megatron_lite.config.model import FAST_TURNS, ORIGINAL_LENGTH, SLOW_TURNS, ModelConfig
from megatron_lite.config.plain import MOST_LAYERS, shown


class Key(NamedTuple):
    """A key of a config that is a field.

    default: the value that transformers takes if the key is missing; a key with REQUIRED must be
        there.
    """

    field: str
    kind: type
    default: Any


class Only(NamedTuple):
    """A key with the only values that can be mapped. reason: why others cannot.

    The last value is the one that an exported config has.
    """

    values: tuple[Any, ...]
    reason: str


class KeyRule(NamedTuple):
    """A fact of a model that is not one key.

    read: sets fields from a config, in a dict. It returns notes about what changes no size and
        still changes results, which is left out.
    write: returns the keys of a config that express the model. They need not express it exactly,
        because an export reads them back and compares.
    keys: the keys that `read` reads.
    """

    read: Callable[[Mapping[str, Any], dict[str, Any]], list[str]]
    write: Callable[[ModelConfig], dict[str, Any]]
    keys: tuple[str, ...]


class TensorNames(NamedTuple):
    """Modules that hold the parts of one module here, and the layout of their tensors.

    layout: a key of `LAYOUTS` in convert/hf_layouts.py.
    """

    theirs: tuple[str, ...]
    layout: str = "same"


class FamilyTensors(NamedTuple):
    """The names of a family's modules, each by the name of the module here.

    base: the prefix of all tensors but those of the head. Files of a model that was saved without
        its head lack it.
    head: the module of the untied output weight.
    outer: the modules outside of a layer, without the base.
    layer: the place of a layer below the base, and its modules.
    """

    base: str
    head: str
    outer: Mapping[str, str | TensorNames]
    layer: tuple[str, Mapping[str, str | TensorNames]]


class FamilyKeys(NamedTuple):
    """One model_type.

    architecture: the class of transformers that holds the model with its head.
    keys, only, fields: what a key becomes, what it must be, and what all members have in common.
    tensors: the names of its weights, which the converter reads.
    """

    architecture: str
    keys: Mapping[str, Key]
    only: Mapping[str, Only]
    fields: Mapping[str, Any]
    rules: tuple[KeyRule, ...]
    tensors: FamilyTensors


REQUIRED = object()
LAYER_KEYS = frozenset({"num_hidden_layers", "n_layer"})
MOST_SIZE = 2**40  # larger than any size of a model


def value_of(config: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
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
    most = MOST_LAYERS if key in LAYER_KEYS else MOST_SIZE
    if isinstance(value, (int, float)) and not -most <= value <= most:
        raise ValueError(f"{key} must be at most {most} (got {shown(repr(value))})")
    return value


def whole_number(config: Mapping[str, Any], key: str, default: int) -> int:
    """Returns a number that may be written as a float but must be whole."""
    value = config.get(key, default)
    if type(value) not in (int, float) or not math.isfinite(value) or value != int(value):
        raise ValueError(f"{key} must be a whole number (got {shown(repr(value))})")
    if abs(value) > MOST_SIZE:
        raise ValueError(f"{key} must be at most {MOST_SIZE} (got {shown(repr(value))})")
    return int(value)


def object_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns an object inside a config; {} if it is missing."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be an object (got {shown(repr(value))})")
    return value


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


LLAMA3 = {
    "low_freq_factor": SLOW_TURNS,
    "high_freq_factor": FAST_TURNS,
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}

KNOWN = frozenset(("rope_theta", "rope_type", "type", "factor", "partial_rotary_factor"))


def rotary(
    *,
    base: str = "rope_theta",
    default_base: int = 10000,
    share: str | None = None,
    default_share: float = 1.0,
) -> KeyRule:
    """Returns the rule of the rotary embedding.

    base: the key of the base. share: the key of the share of a head that is rotated; None: all.
    """

    def read(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
        inside = _parameters(config, base, default_base)
        fields["rotary_base"] = whole_number({base: inside["rope_theta"]}, base, default_base)
        if share is None:
            if inside.get("partial_rotary_factor") not in (1, None):
                raise ValueError("partial_rotary_factor: the whole head is rotated in this family")
        else:
            within = {share: inside.get("partial_rotary_factor", config.get(share))}
            fields["rotary_percent"] = value_of(within, share, float, default_share)
        return _scaling(inside, config, fields)

    def write(model: ModelConfig) -> dict[str, Any]:
        found: dict[str, Any] = {base: float(model.rotary_base), "rope_scaling": None}
        if share is not None:
            found[share] = model.rotary_percent
        if model.use_rope_scaling:
            factor = model.rope_scaling_factor
            found["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **LLAMA3}
        elif model.rotary_seq_len_interpolation_factor is not None:
            factor = float(model.rotary_seq_len_interpolation_factor)
            found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        return found

    keys = ("rope_parameters", "rope_scaling", base, *([] if share is None else [share]))
    return KeyRule(read, write, keys)


def _parameters(config: Mapping[str, Any], base: str, default_base: int) -> dict[str, Any]:
    """Returns rope_parameters, or what stands for it in older files, with its rope_theta.

    Raises ValueError if older and newer keys contradict: versions of transformers differ in which
    of them they read.
    """
    newer, older = object_of(config, "rope_parameters"), object_of(config, "rope_scaling")
    outside = default_base if config.get(base) is None else config[base]
    if older and config.get(base) is not None and older.get("rope_theta", outside) != outside:
        raise ValueError(
            f"rope_theta is {shown(repr(older['rope_theta']))} in rope_scaling and {base} is "
            f"{shown(repr(outside))} outside of it, and versions of transformers read one or the "
            "other: remove one"
        )
    full = [
        {"rope_theta": outside, "rope_type": one.get("type", "default"), **one}
        for one in (newer, older)
    ]
    if newer and older:
        names = sorted((full[0].keys() | full[1].keys()) - {"type"})
        differing = [name for name in names if full[0].get(name) != full[1].get(name)]
        if differing:
            raise ValueError(
                f"rope_parameters and rope_scaling differ in {shown(', '.join(differing))}, and "
                "versions of transformers read one or the other: remove one"
            )
    found = full[1] if older else full[0]
    unknown = found.keys() - KNOWN - LLAMA3.keys()
    if found["rope_type"] in (None, "default", "linear", "llama3") and unknown:
        raise ValueError(
            f"the rotary embedding has the unknown key {shown(', '.join(sorted(unknown)))}: it "
            "may change results, so the config is not read"
        )
    return found


def _scaling(
    scaling: Mapping[str, Any], config: Mapping[str, Any], fields: dict[str, Any]
) -> list[str]:
    kind = scaling["rope_type"]
    if kind in (None, "default"):
        return []
    if kind == "linear":
        fields["rotary_seq_len_interpolation_factor"] = whole_number(scaling, "factor", 1)
        return []
    if kind == "llama3":
        # transformers prefers the number outside of the object
        key = "original_max_position_embeddings"
        length = scaling.get(key, config.get("max_position_embeddings"))
        there = {**scaling, key: config.get(key, length)}
        differing = [key for key, value in LLAMA3.items() if there.get(key) != value]
        if not differing:
            fields["use_rope_scaling"] = True
            fields["rope_scaling_factor"] = value_of(scaling, "factor", float, 8.0)
            return []
        kind = ", ".join(f"{key} {shown(repr(there.get(key)))}" for key in differing)
        rule = ", ".join(f"{key} {value:g}" for key, value in LLAMA3.items())
        return [
            f"rope_scaling 'llama3' with {kind} is left out: --use-rope-scaling has the constants "
            f"of Llama 3.1, {rule}"
        ]
    return [
        f"rope_scaling {shown(repr(kind))} is left out: it changes no size, but a run here does "
        "not scale its rotary embedding so (it knows linear and llama3)"
    ]


def _read_unrotated(config: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
    number = fields["num_layers"]
    given = config.get("no_rope_layers")
    if given is None:
        interval = value_of(config, "no_rope_layer_interval", int, 4)
        if interval < 1:
            raise ValueError(f"no_rope_layer_interval must be at least 1 (got {interval})")
        given = [int((layer + 1) % interval != 0) for layer in range(number)]
    if not isinstance(given, list) or len(given) != number or not set(given) <= {0, 1}:
        raise ValueError(
            f"no_rope_layers must have a 0 or a 1 for each of {number} layers (got "
            f"{shown(repr(given))})"
        )
    # 1 means that the layer does have a rotary embedding
    without = tuple(1 - int(has) for has in given)
    if any(without):
        # the interval that gives this list, or the list itself if there is none
        fields["no_rope_freq"] = next(
            (
                every
                for every in range(1, number + 1)
                if number % every == 0
                and without == tuple(int(marks(every, layer)) for layer in range(number))
            ),
            without,
        )
    return []


def _write_unrotated(model: ModelConfig) -> dict[str, Any]:
    return {
        "no_rope_layers": [int(model.layer_rotates(layer)) for layer in range(model.num_layers)]
    }


UNROTATED_LAYERS = KeyRule(
    _read_unrotated, _write_unrotated, ("no_rope_layers", "no_rope_layer_interval")
)
