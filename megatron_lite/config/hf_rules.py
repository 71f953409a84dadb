"""The facts about a family of Hugging Face models that are not one key of its config.json.

The same rule serves both directions: `read` sets fields of ModelConfig from a config, and `write`
returns keys that express a model. The keys need not express it exactly, because an export reads
them back and compares. Standard library only.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from .checks import MOST_LAYERS, Values, as_object, quoted
from .model import ModelConfig

REQUIRED = object()
KINDS = {bool: "true or false", int: "a whole number", float: "a number"}
MOST_SIZE = 2**40  # larger than any size of a model
SLIDING, FULL = "sliding_attention", "full_attention"
MLPS = ("dense", "sparse")
FIRST = "max_window_layers"


class Config:
    """A parsed config.json that is being read.

    seen: the keys that were asked for.
    inexact: notes about what changes no size and still changes results, which is left out.
    """

    def __init__(self, values: Values) -> None:
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
            raise ValueError(
                f"{key} must be {KINDS.get(kind, kind.__name__)} (got {quoted(value)})"
            )
        most = MOST_LAYERS if key in ("num_hidden_layers", "n_layer") else MOST_SIZE
        if isinstance(value, (int, float)) and not -most <= value <= most:
            raise ValueError(f"{key} must be at most {most} (got {quoted(value)})")
        return value

    def object(self, key: str) -> Values:
        """Returns an object inside the config; {} if it is missing."""
        return as_object(self.get(key) or {}, key)


# A rule is a fact of a model that is not one key: it has `read(config, fields)`, which adds to the
# fields, and `write(model)`, which returns values of the config.


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


class Biases(NamedTuple):
    """attention_bias: those of queries, keys, values and the projection. mlp_bias: of the MLP too.

    default: of both keys. mlp: whether transformers reads mlp_bias.
    """

    default: bool = False
    mlp: bool = False

    def read(self, config: Config, fields: Values) -> None:
        attention = config.value("attention_bias", bool, self.default)
        mlp = self.mlp and config.value("mlp_bias", bool, self.default)
        if mlp and not attention:
            raise ValueError("mlp_bias True with attention_bias False: an MLP has no bias alone")
        # add_bias_linear has those of attention too, and Megatron-LM no add_proj_bias
        alone = attention and not mlp
        fields |= dict(add_bias_linear=mlp, add_qkv_bias=attention, add_proj_bias=alone)

    def write(self, model: ModelConfig) -> Values:
        found = {"attention_bias": model.has_proj_bias}
        return found | ({"mlp_bias": model.add_bias_linear} if self.mlp else {})


class ScaledEmbedding(NamedTuple):
    """The embeddings are multiplied by sqrt(hidden_size)."""

    def read(self, config: Config, fields: Values) -> None:
        fields["embedding_multiplier"] = fields["hidden_size"] ** 0.5

    def write(self, model: ModelConfig) -> Values:
        return {}


class Windows(NamedTuple):
    """The attention windows.

    layers: which layers have one: "all"; "unrotated", those without a rotary embedding; "none";
        "listed", those of layer_types; else FIRST, the key of the number of the first one. But for
        "all", layer_types, if it is there, says which layers have one.
    default: the window, if its key is missing. needed: it must be a number, of which no layer needs
        to have one.
    switched: whether use_sliding_window turns the windows on.
    without, first: if layer_types is missing, every such layer from the first on has no window.
        Without `without`, `first` is the first layer with a window if FIRST is missing.
    unlisted: the kind of every layer if layer_types is missing, if it is not the window's.
    rotates: whether only layers with a window are rotated, where there are windows.
    """

    layers: str
    default: int | None = None
    needed: bool = False
    switched: bool = False
    without: int = 0
    first: int = 0
    rotates: bool = False
    unlisted: str = ""

    def read(self, config: Config, fields: Values) -> None:
        number, kinds = fields["num_layers"], config.get("layer_types")
        if kinds is None and self.unlisted:
            kinds = [self.unlisted] * number
        size = config.value("sliding_window", int, self.default, null=None)
        is_used = size is not None
        if self.needed and not is_used:
            raise ValueError(
                "sliding_window null has no counterpart: transformers needs a number in this "
                f"family (a layer of layer_types that is {FULL} has no window)"
            )
        if self.switched:
            is_used &= config.value("use_sliding_window", bool, False)
        if is_used and self.layers == "none":
            raise ValueError(
                f"sliding_window {size} has no counterpart: no layer of this family has a window, "
                "or versions of transformers differ in which ones: set it to null"
            )
        have = [int(is_used)] * number
        if is_used and self.layers == "unrotated":
            have = list(fields.get("no_rope_freq", (0,) * number))
        elif is_used and self.without:
            have = [int(layer % self.without != self.first) for layer in range(number)]
        elif is_used and self.layers == FIRST:
            first = config.value(FIRST, int, self.first)
            have = [int(layer >= first) for layer in range(number)]
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != number:
                raise ValueError(f"layer_types must have an entry for each of {number} layers")
            for kind in kinds:
                if kind not in (SLIDING, FULL, "attention"):  # an older name of FULL
                    raise ValueError(
                        f"layer_types {quoted(kind)} has no counterpart: only {SLIDING} and {FULL}"
                    )
            theirs = [int(kind == SLIDING) for kind in kinds]
            if theirs != have and (self.layers == "all" or not is_used):
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
        have = [model.layer_window(layer) is not None for layer in range(model.num_layers)]
        unused = model.max_position_embeddings if self.needed else None
        found: Values = {"sliding_window": unused if window is None else window[0] + 1}
        if self.switched:
            found["use_sliding_window"] = any(have)
        if self.layers == FIRST:
            found[FIRST] = [*have, True].index(True)
        if self.layers != "all":
            found["layer_types"] = [SLIDING if one else FULL for one in have]
        return found


EPSILON = 1e-6  # of transformers' norms of latents


class Latent(Groups):
    """The latent attention of DeepSeek-V2 and V3. It comes after Rotary."""

    def read(self, config: Config, fields: Values) -> None:
        heads = fields["num_attention_heads"]
        rotated = fields["qk_pos_emb_head_dim"]
        for key, other, only in (
            ("num_key_value_heads", "num_attention_heads", heads),
            ("head_dim", "qk_rope_head_dim", rotated),  # of the rotary embedding in transformers
        ):
            if config.get(key) not in (None, only):
                raise ValueError(f"{key} must be {other}, {only} (got {quoted(config.get(key))})")
        rope = config.object("rope_scaling") or config.object("rope_parameters")
        if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
            raise ValueError("mscale and mscale_all_dim need each other: give both, or none")
        if fields["norm_epsilon"] != EPSILON:
            fields["latent_norm_epsilon"] = EPSILON
        fields.setdefault("rope_type", "rope")


class Experts(NamedTuple):
    """The number of experts, the width of each, the shared ones, and the layers that have them.

    experts, default, shared: the numbers if their keys are missing. default None: it must be there.
    keys: those of the number of experts, in which versions of transformers differ; the first one is
        written.
    size, together: the keys of the width, and of the number of shared experts (none: no such).
    layers: what says which layers have a dense MLP instead, of the width intermediate_size:
        "stepped", decoder_sparse_step and mlp_only_layers; "listed", mlp_layer_types, if there.
    dense: how many first layers have one if first_k_dense_replace is missing. None: not read.
    """

    experts: int
    keys: Sequence[str] = ("num_experts", "num_local_experts")
    size: str = "intermediate_size"
    default: int | None = None
    layers: str = ""
    dense: int | None = None
    together: str = ""
    shared: int = 0

    def read(self, config: Config, fields: Values) -> None:
        given = {config.value(key, int, None) for key in self.keys} - {None}
        if len(given) > 1:
            raise ValueError(f"{' and '.join(sorted(self.keys))} differ: {sorted(given)}")
        default = self.default or REQUIRED
        size, number = config.value(self.size, int, default), fields["num_layers"]
        fields["num_experts"] = given.pop() if given else self.experts
        fields["moe_ffn_hidden_size"] = size
        if self.together:
            shared = config.value(self.together, int, self.shared)
            fields["moe_shared_expert_intermediate_size"] = shared * size
        dense: Collection[int] = ()
        if self.dense is not None:
            dense = range(config.value("first_k_dense_replace", int, self.dense))
        elif self.layers == "stepped":
            step = config.value("decoder_sparse_step", int, 1)
            dense = config.get("mlp_only_layers") or []
            if step < 1 or not isinstance(dense, list) or not {*map(type, dense)} <= {int}:
                raise ValueError(
                    f"decoder_sparse_step must be at least 1 (got {step}), and mlp_only_layers a "
                    f"list of layers (got {quoted(dense)})"
                )
            dense = {*dense, *(n for n in range(number) if (n + 1) % step)}
        kinds = config.get("mlp_layer_types") if self.layers == "listed" else None
        if kinds is None:
            kinds = [MLPS[layer not in dense] for layer in range(number)]
        if not isinstance(kinds, list) or len(kinds) != number or any(x not in MLPS for x in kinds):
            raise ValueError(
                f"mlp_layer_types must have one of {MLPS} for each of {number} layers (got "
                f"{quoted(kinds)})"
            )
        if "dense" in kinds:
            fields["moe_layer_freq"] = tuple(map(MLPS.index, kinds))

    def write(self, model: ModelConfig) -> Values:
        if model.num_experts is None:
            return {}
        size = model.expert_size
        kinds = [MLPS[model.layer_has_experts(layer)] for layer in range(model.num_layers)]
        found: Values = {self.keys[0]: model.num_experts, self.size: size}
        if self.together:
            found[self.together] = (model.moe_shared_expert_intermediate_size or 0) // size
        if self.layers == "listed":
            found["mlp_layer_types"] = kinds
        elif self.dense is not None:
            found["first_k_dense_replace"] = kinds.count("dense")
        elif self.layers == "stepped":
            dense = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
            found |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        return found


class ExpertGroups(NamedTuple):
    """The groups of experts, of which a token chooses some first.

    groups, chosen: the numbers if their keys are missing.
    judged: how many of its best experts a group is judged by.
    by_method: whether groups count only if the key topk_method says so.
    """

    groups: int
    chosen: int
    judged: int
    by_method: bool = False

    def read(self, config: Config, fields: Values) -> None:
        groups = config.value("n_group", int, self.groups)
        chosen = config.value("topk_group", int, self.chosen)
        if self.by_method and config.get("topk_method") != "group_limited_greedy":
            return
        if chosen < groups:
            fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
            fields["moe_router_group_best"] = self.judged

    def write(self, model: ModelConfig) -> Values:
        found: Values = {
            "n_group": model.moe_router_num_groups or 1,
            "topk_group": model.moe_router_group_topk or 1,
        }
        if self.by_method:
            found["topk_method"] = "group_limited_" * model.chooses_in_groups + "greedy"
        return found
