"""The facts about a family of Hugging Face models that are not one key of its config.json.

The same rule serves both directions: `read` sets fields of ModelConfig from a config, and `write`
returns keys that express a model. The keys need not express it exactly, because an export reads
them back and compares. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from megatron_lite.config.checks import quoted
from megatron_lite.config.model import FAST_TURNS, ORIGINAL_LENGTH, SLOW_TURNS, ModelConfig
from megatron_lite.config.plain import MOST_LAYERS, shown

Values = dict[str, Any]

REQUIRED = object()
MOST_SIZE = 2**40  # larger than any size of a model
SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA3 = {
    "low_freq_factor": SLOW_TURNS,
    "high_freq_factor": FAST_TURNS,
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}
ROTARY_KEYS = {"rope_theta", "rope_type", "factor", "partial_rotary_factor", *LLAMA3}


class Config:
    """A parsed config.json that is being read.

    seen: the keys that were asked for.
    inexact: notes about what changes no size and still changes results, which is left out.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.seen: set[str] = set()
        self.inexact: list[str] = []

    def get(self, key: str) -> Any:
        """Returns the value of a key as it stands; None if it is missing."""
        self.seen.add(key)
        return self.values.get(key)

    def value(self, key: str, kind: type, default: Any, **null: Any) -> Any:
        """Returns the value of a key with its type and size checked.

        default: what transformers takes if the key is missing, and if it is null, unless `null` is
            given. REQUIRED: the key must be there.
        """
        value = self.get(key)
        if value is None:
            if default is REQUIRED:
                raise ValueError(f"{key} is missing")
            return null.get("null", default) if key in self.values else default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{key} must be of type {kind.__name__} (got {quoted(value)})")
        most = MOST_LAYERS if key in ("num_hidden_layers", "n_layer") else MOST_SIZE
        if isinstance(value, (int, float)) and not -most <= value <= most:
            raise ValueError(f"{key} must be at most {most} (got {quoted(value)})")
        return value

    def object(self, key: str) -> Values:
        """Returns an object inside the config; {} if it is missing."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise ValueError(f"{key} must be an object (got {quoted(value)})")
        return value


class Rule(Protocol):
    """A fact of a model that is not one key."""

    def read(self, config: Config, fields: Values) -> None: ...
    def write(self, model: ModelConfig) -> Values: ...


class Groups(NamedTuple):
    """The key/value heads. default: g, if the key is missing. None: each head has its own."""

    default: int | None = None

    def read(self, config: Config, fields: Values) -> None:
        heads = fields["num_attention_heads"]
        groups = config.value("num_key_value_heads", int, self.default or heads, null=heads)
        if groups != heads:
            fields |= dict(group_query_attention=True, num_query_groups=groups)

    def write(self, model: ModelConfig) -> Values:
        return {"num_key_value_heads": model.query_groups}


class Windows(NamedTuple):
    """The attention windows.

    layers: which layers have one: "all"; "unrotated", those without a rotary embedding; "none";
        "listed", those of layer_types; else the key of the number of the first layer with a
        window. But for "all", layer_types, if it is there, says which layers have one, and but for
        "all" and "listed", use_sliding_window turns the windows on.
    default: the window, if its key is missing.
    switched: whether use_sliding_window turns the windows of "all" layers on.
    without, first: if layer_types is missing, every such layer from the first on has no window.
    rotates: whether only layers with a window are rotated, where there are windows.
    """

    layers: str
    default: int | None = None
    switched: bool = False
    without: int = 0
    first: int = 0
    rotates: bool = False

    def read(self, config: Config, fields: Values) -> None:
        number, kinds = fields["num_layers"], config.get("layer_types")
        size = config.value("sliding_window", int, self.default, null=None)
        is_used, is_fixed = size is not None, self.layers == "all"
        if self.switched or self.layers not in ("all", "listed"):
            is_used &= config.value("use_sliding_window", bool, False)
        if is_used and self.layers == "none":
            raise ValueError(
                "use_sliding_window True has no counterpart: versions of transformers differ in "
                "which layers of this family have the window"
            )
        have = [int(is_used)] * number
        if is_used and self.layers == "unrotated":
            have = list(fields.get("no_rope_freq", (0,) * number))
        elif is_used and self.without:
            have = [int(layer % self.without != self.first) for layer in range(number)]
        elif is_used and self.layers not in ("all", "listed"):
            first = config.value(self.layers, int, 28)
            have = [int(layer >= first) for layer in range(number)]
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != number:
                raise ValueError(f"layer_types must have an entry for each of {number} layers")
            for kind in kinds:
                if kind not in (SLIDING, FULL):
                    raise ValueError(
                        f"layer_types {quoted(kind)} has no counterpart: only {SLIDING} and {FULL}"
                    )
            theirs = [int(kind == SLIDING) for kind in kinds]
            if theirs != have and (is_fixed or not is_used):
                raise ValueError(
                    f"layer_types {quoted(kinds)} contradicts the windows of this family with "
                    f"sliding_window {size} and its switches: correct one of them"
                )
            have = theirs
        if self.rotates and is_used and not all(have):
            fields["no_rope_freq"] = tuple(1 - one for one in have)
        if any(have):
            # The query's own token counts in a sliding window, and not in --window-size.
            fields["window_size"] = (size - 1, 0)
            if not all(have):
                fields["window_attn_skip_freq"] = tuple(have)

    def write(self, model: ModelConfig) -> Values:
        window = model.window_size
        found: Values = {"sliding_window": None if window is None else window[0] + 1}
        if self.layers == "all":
            return {**found, "use_sliding_window": window is not None} if self.switched else found
        have = [model.layer_window(layer) is not None for layer in range(model.num_layers)]
        kinds = [SLIDING if one else FULL for one in have]
        if self.layers == "listed":
            return {**found, "layer_types": kinds}
        if self.layers not in ("unrotated", "none"):
            found[self.layers] = have.index(True) if any(have) else model.num_layers
        return {**found, "use_sliding_window": any(have), "layer_types": kinds}


class Experts(NamedTuple):
    """The number of experts, the width of each, and the layers that have them.

    number: that of the experts, if neither of its keys is there. key: the one that is written;
        versions of transformers differ in it.
    size: the key of the width. sparse: whether decoder_sparse_step and mlp_only_layers say which
        layers have a dense MLP instead, of the width intermediate_size.
    """

    number: int
    key: str = "num_experts"
    size: str = "intermediate_size"
    default: int | None = None
    sparse: bool = False

    def read(self, config: Config, fields: Values) -> None:
        counts = [config.value(key, int, None) for key in ("num_experts", "num_local_experts")]
        given = {count for count in counts if count is not None}
        if len(given) > 1:
            raise ValueError(f"num_experts {counts[0]} with num_local_experts {counts[1]}")
        fields["num_experts"] = given.pop() if given else self.number
        default = REQUIRED if self.default is None else self.default
        fields["moe_ffn_hidden_size"] = config.value(self.size, int, default)
        if not self.sparse:
            return
        step = config.value("decoder_sparse_step", int, 1)
        dense = config.get("mlp_only_layers") or []
        if step < 1 or not isinstance(dense, list) or not {*map(type, dense)} <= {int}:
            raise ValueError(
                f"decoder_sparse_step must be at least 1 (got {step}), and mlp_only_layers a list "
                f"of layers (got {quoted(dense)})"
            )
        dense = {*dense, *(n for n in range(fields["num_layers"]) if (n + 1) % step)}
        have = [int(layer not in dense) for layer in range(fields["num_layers"])]
        if not all(have):
            fields["moe_layer_freq"] = tuple(have)

    def write(self, model: ModelConfig) -> Values:
        if model.num_experts is None:
            return {}
        found: Values = {self.key: model.num_experts, self.size: model.expert_size}
        if not self.sparse:
            return found
        layers = range(model.num_layers)
        dense = [layer for layer in layers if not model.layer_has_experts(layer)]
        return {**found, "decoder_sparse_step": 1, "mlp_only_layers": dense}


class Unrotated(NamedTuple):
    """The layers without a rotary embedding."""

    def read(self, config: Config, fields: Values) -> None:
        number, given = fields["num_layers"], config.get("no_rope_layers")
        interval = config.value("no_rope_layer_interval", int, 4)
        if interval < 1:
            raise ValueError(f"no_rope_layer_interval must be at least 1 (got {interval})")
        if given is None:
            given = [int((layer + 1) % interval != 0) for layer in range(number)]
        if not isinstance(given, list) or len(given) != number or not set(given) <= {0, 1}:
            raise ValueError(
                f"no_rope_layers must have a 0 or a 1 for each of {number} layers (got "
                f"{quoted(given)})"
            )
        if not all(given):  # 1 means that the layer does have a rotary embedding
            fields["no_rope_freq"] = tuple(1 - int(has) for has in given)

    def write(self, model: ModelConfig) -> Values:
        layers = range(model.num_layers)
        return {"no_rope_layers": [int(model.layer_rotates(layer)) for layer in layers]}


class Rotary(NamedTuple):
    """The rotary embedding: its base, its scaling, and the share of a head that is rotated.

    Older files have rope_theta and rope_scaling, newer ones an object rope_parameters. Both are
    read, and the older keys are written, which every version reads.

    base: the key of the base. share: the key of the share; None: the whole head.
    form: "by layer": rope_parameters has an object for each kind of layer, and they must be equal.
        "explicit": without the object transformers takes a scaling of its own.
    """

    default_base: int = 10000
    base: str = "rope_theta"
    share: str | None = None
    default_share: float = 1.0
    form: str = ""

    def read(self, config: Config, fields: Values) -> None:
        found = self._parameters(config)
        fields["rotary_base"] = _whole_number(self.base, found["rope_theta"])
        share = found.get("partial_rotary_factor", self.share and config.get(self.share))
        if self.share is not None:
            inside = Config({self.share: share})
            fields["rotary_percent"] = inside.value(self.share, float, self.default_share)
        elif share not in (1, None):
            raise ValueError("partial_rotary_factor: the whole head is rotated in this family")
        kind = found["rope_type"]
        if kind == "linear":
            factor = _whole_number("factor", found.get("factor", 1))
            fields["rotary_seq_len_interpolation_factor"] = factor
        elif kind == "llama3":
            self._read_llama3(found, config, fields)
        elif kind not in (None, "default"):
            config.inexact.append(
                f"rope_scaling {quoted(kind)} is left out: it changes no size, but a run here does "
                "not scale its rotary embedding so (it knows linear and llama3)"
            )

    def _parameters(self, config: Config) -> Values:
        """Returns rope_parameters, or what stands for it in older files, with its rope_theta.

        Raises ValueError if two places contradict: versions of transformers differ in which of
        them they read.
        """
        outside = config.get(self.base)
        base = self.default_base if outside is None else outside
        both = [config.object(key) for key in ("rope_parameters", "rope_scaling")]
        if self.form == "explicit" and not any(both):
            raise ValueError("rope_parameters is missing")
        if {FULL, SLIDING} & both[0].keys():
            of_layers = Config(both[0])
            both = [of_layers.object(FULL), of_layers.object(SLIDING), both[1]]
        elif self.form == "by layer" and (
            base != self.default_base
            or both[1].get("rope_type", both[1].get("type")) in ("linear", "llama3")
        ):
            raise ValueError(
                f"rope_scaling and {self.base} outside of rope_parameters are of some layers only "
                "in this family: a model here has one rotary embedding"
            )
        places = [
            {"rope_theta": base, "rope_type": one.get("type", "default"), **one}
            for one in [one for one in both if one] or [{}]
        ]
        for place in places:
            place.pop("type", None)
        found = places[0]
        if any(found != place for place in places) or (
            outside is not None and found["rope_theta"] != outside
        ):
            raise ValueError(
                f"rope_parameters, rope_scaling and {self.base} differ, or those of two kinds of "
                "layers do: a model here has one rotary embedding, and versions of transformers "
                "read one or the other: remove one"
            )
        unknown = found.keys() - ROTARY_KEYS
        if unknown and found["rope_type"] in (None, "default", "linear", "llama3"):
            raise ValueError(
                f"the rotary embedding has the unknown key {shown(', '.join(sorted(unknown)))}: "
                "it may change results, so the config is not read"
            )
        return found

    def _read_llama3(self, found: Values, config: Config, fields: Values) -> None:
        # transformers prefers the number outside of the object
        key = "original_max_position_embeddings"
        length = config.get(key) or found.get(key) or config.get("max_position_embeddings")
        there = {**found, key: length}
        other = [
            f"{key} {quoted(there.get(key))}" for key in LLAMA3 if there.get(key) != LLAMA3[key]
        ]
        if other:
            rule = ", ".join(f"{key} {value:g}" for key, value in LLAMA3.items())
            config.inexact.append(
                f"rope_scaling 'llama3' with {', '.join(other)} is left out: --use-rope-scaling "
                f"has the constants of Llama 3.1, {rule}"
            )
            return
        fields["use_rope_scaling"] = True
        fields["rope_scaling_factor"] = Config(found).value("factor", float, 8.0)

    def write(self, model: ModelConfig) -> Values:
        scaling: Values | None = None
        if model.use_rope_scaling:
            scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **LLAMA3}
        elif model.rotary_seq_len_interpolation_factor is not None:
            factor = float(model.rotary_seq_len_interpolation_factor)
            scaling = {"rope_type": "linear", "factor": factor}
        base = float(model.rotary_base)
        found: Values = {self.base: base, "rope_scaling": scaling}
        if self.share is not None:
            found[self.share] = model.rotary_percent
        if self.form:
            one = {"rope_theta": base, "rope_type": "default", **(scaling or {})}
            by_layer = self.form == "by layer"
            found["rope_parameters"] = {FULL: one, SLIDING: one} if by_layer else one
        return found


def _whole_number(key: str, value: Any) -> int:
    """Returns a number that may be written as a float but must be whole."""
    if type(value) not in (int, float) or not math.isfinite(value) or value != int(value):
        raise ValueError(f"{key} must be a whole number (got {quoted(value)})")
    if abs(value) > MOST_SIZE:
        raise ValueError(f"{key} must be at most {MOST_SIZE} (got {quoted(value)})")
    return int(value)
