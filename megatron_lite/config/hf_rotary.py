"""The rotary embedding of a Hugging Face model: rules of hf_rules.py. Standard library only."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .checks import Values, as_whole, quoted, shown
from .hf_rules import FULL, MOST_SIZE, REQUIRED, SLIDING, Config
from .model import ModelConfig
from .variants import FAST_TURNS, ORIGINAL_LENGTH, SLOW_TURNS

LENGTH = "original_max_position_embeddings"
LLAMA3 = {"low_freq_factor": SLOW_TURNS, "high_freq_factor": FAST_TURNS, LENGTH: ORIGINAL_LENGTH}
MSCALES = ("mscale", "mscale_all_dim")
OF_RULE = {"yarn": ("beta_fast", "beta_slow"), "longrope": ("short_factor", "long_factor")}
KEYS = {"rope_theta", "rope_type", "factor", "partial_rotary_factor", "attention_factor", *LLAMA3}
KEYS |= {*MSCALES, *OF_RULE["yarn"], *OF_RULE["longrope"]}
RULES = ("default", "linear", "llama3", "yarn", "longrope")


class Rotary(NamedTuple):
    """The rotary embedding: its base, its scaling, and the share of a head that is rotated.

    Older files have rope_theta and rope_scaling, newer ones an object rope_parameters. Both are
    read, and the older keys are written, which every version reads.

    base: the key of the base. share: the key of the share; None: the whole head.
    form: "by layer": rope_parameters has an object for each kind of layer; that of layers with a
        window has no scaling, or is equal to the other one.
        "explicit": without the object transformers takes a scaling of its own.
    local: the key of the base of layers with a window in older files; default_local: that base.
    default_length: the length before a scaling if its key is missing outside of the object.
    scalings: those of RULES that the family has.
    """

    default_base: int = 10000
    base: str = "rope_theta"
    share: str | None = None
    default_share: float = 1.0
    form: str = ""
    local: str = ""
    default_local: int = 0
    default_length: int = 0
    scalings: Sequence[str] = RULES

    def read(self, config: Config, fields: Values) -> None:
        found = self._parameters(config, fields)
        fields["rotary_base"] = _whole_number(self.base, found["rope_theta"])
        share = found.get("partial_rotary_factor", self.share and config.get(self.share))
        if self.share:
            inside = Config({self.share: share})
            fields["rotary_percent"] = inside.value(self.share, float, self.default_share)
        elif share not in (1, None):
            raise ValueError("partial_rotary_factor: the whole head is rotated in this family")
        kind = found["rope_type"]
        if kind in RULES and kind not in self.scalings:
            raise ValueError(
                f"rope_scaling {quoted(kind)} has no counterpart: this family has only "
                f"{', '.join(self.scalings)}"
            )
        if kind == "linear":
            factor = _whole_number("factor", Config(found).value("factor", float, REQUIRED))
            fields["rotary_seq_len_interpolation_factor"] = factor
        elif kind == "llama3":
            there = {**found, LENGTH: self._original_length(found, config)}
            other = [
                f"{key} {quoted(there.get(key))}" for key in LLAMA3 if there.get(key) != LLAMA3[key]
            ]
            if not other:
                fields["use_rope_scaling"] = True
                fields["rope_scaling_factor"] = Config(found).value("factor", float, REQUIRED)
                return
            config.inexact.append(
                f"rope_scaling 'llama3' with {', '.join(other)} is left out: --use-rope-scaling "
                "has the constants of Llama 3.1, "
                f"{', '.join(f'{key} {value:g}' for key, value in LLAMA3.items())}"
            )
        elif kind in ("yarn", "longrope"):
            self._read_stretched(Config(found), config, fields)
        elif kind not in RULES:
            depends = ", which depends on the length of the text," * (kind == "dynamic")
            config.inexact.append(
                f"rope_scaling {quoted(kind)}{depends} is left out: it changes no size, but a run "
                f"here does not scale its rotary embedding so (it knows {', '.join(RULES[1:])})"
            )

    def _parameters(self, config: Config, fields: Values) -> Values:
        """Returns rope_parameters, or what stands for it in older files, with its rope_theta.

        Raises ValueError if two places contradict: versions of transformers differ in which of
        them they read.
        """
        outside = config.get(self.base)
        base = self.default_base if outside is None else outside
        new, old = (config.object(key) for key in ("rope_parameters", "rope_scaling"))
        if self.form == "explicit" and not (new or old):
            raise ValueError("rope_parameters is missing")
        local = {}
        if {FULL, SLIDING} & new.keys():
            if self.form != "by layer":
                raise ValueError(
                    f"rope_parameters has {FULL} or {SLIDING}, and transformers reads no such "
                    "objects in this family: write one object for all layers"
                )
            of_layers = Config(new)
            new, local = of_layers.object(FULL), of_layers.object(SLIDING)
        elif self.form == "by layer" and new:
            raise ValueError(
                f"rope_parameters must have the objects {FULL} and {SLIDING} in this family: "
                "transformers ignores other keys"
            )
        elif self.form == "by layer" and not self.local and base != self.default_base:
            raise ValueError(
                f"{self.base} outside of rope_parameters is that of some layers only in this family"
            )
        untold = [
            "short_factor" in one and {"rope_type", "type"}.isdisjoint(one) for one in (new, old)
        ]
        if any(untold) or (self.form == "by layer" and old and "rope_type" not in old):
            raise ValueError(
                "rope_scaling or rope_parameters has no rope_type, and transformers ignores its "
                "other keys then: add it"
            )
        places = [
            {"rope_theta": base, "rope_type": one.get("type", "default"), **one}
            for one in [*filter(None, (new, old))] or [{}]
        ]
        for place in places:
            place.pop("type", None)
            if "short_factor" in place:  # older files say su or yarn
                place["rope_type"] = "longrope"
        found = places[0]
        if found != places[-1] or outside not in (None, found["rope_theta"]):
            raise ValueError(
                f"rope_parameters, rope_scaling and {self.base} differ, and versions of "
                "transformers read one or the other: remove one"
            )
        unknown = found.keys() - KEYS
        if unknown and found["rope_type"] in RULES:
            raise ValueError(
                f"the rotary embedding has the unknown key {shown(', '.join(sorted(unknown)))}: "
                "it may change results, so the config is not read"
            )
        local_base = config.get(self.local) or self.default_local or self.default_base
        local = {"rope_theta": local_base, "rope_type": "default", **local}
        if self.form == "by layer" and local != found and "window_size" in fields:
            if local["rope_type"] != "default" or len(local) > 2:
                raise ValueError("layers with a window have a rotary embedding without a scaling")
            fields["rotary_base_local"] = _whole_number("rope_theta", local["rope_theta"])
        return found

    def _read_stretched(self, found: Config, config: Config, fields: Values) -> None:
        kind, length = found.get("rope_type"), self._original_length(found.values, config)
        by_length = fields["max_position_embeddings"] / length if kind == "longrope" else REQUIRED
        fields |= {"rope_type": kind, LENGTH: length}
        fields["rotary_scaling_factor"] = found.value("factor", float, by_length)
        fields["rope_attention_factor"] = found.value("attention_factor", float, None)
        scales = {key: found.value(key, float, 0.0) for key in MSCALES}
        if all(scales.values()):
            fields |= scales
        for key in OF_RULE[kind]:
            if kind == "longrope":
                numbers = (Config({key: one}) for one in found.value(key, list, REQUIRED))
                fields[key] = tuple(one.value(key, float, REQUIRED) for one in numbers)
            elif found.get(key) is not None:
                fields[key] = found.value(key, float, None)

    def _original_length(self, found: Values, config: Config) -> int:
        # transformers prefers the number outside of the object, and reads none beside objects of
        # each kind of layer
        outside = config.get(LENGTH) or self.default_length
        length = (self.form != "by layer" and outside) or found.get(LENGTH)
        most = config.get("max_position_embeddings")
        return as_whole(length or most, LENGTH, 1, MOST_SIZE)

    def write(self, model: ModelConfig) -> Values:
        scaling: Values | None = None
        if model.use_rope_scaling:
            scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **LLAMA3}
        elif model.rotary_seq_len_interpolation_factor:
            factor = float(model.rotary_seq_len_interpolation_factor)
            scaling = {"rope_type": "linear", "factor": factor}
        elif model.rope_type != "rope":
            factor, length = model.rotary_scaling_factor, model.original_max_position_embeddings
            scaling = {"rope_type": model.rope_type, "factor": factor, LENGTH: length}
            scaling["attention_factor"] = model.rotary_magnitude
            for key in OF_RULE[model.rope_type or ""]:
                value = getattr(model, key)
                scaling[key] = list(value) if isinstance(value, tuple) else value
            if model.multi_latent_attention and model.mscale_all_dim:  # scores have a scale
                scaling |= {key: getattr(model, key) for key in MSCALES}
        base = float(model.rotary_base)
        found: Values = {self.base: base, "rope_scaling": scaling}
        if model.rope_type != "rope":  # Phi-3 reads it here
            found[LENGTH] = model.original_max_position_embeddings
        if self.share:
            found[self.share] = model.rotary_percent
        if self.form:
            one = {"rope_theta": base, "rope_type": "default", **(scaling or {})}
            local = one
            if model.rotary_base_local:
                local = {"rope_theta": float(model.rotary_base_local), "rope_type": "default"}
                found |= {self.local: local["rope_theta"]} if self.local else {}
            by_layer = self.form == "by layer"
            found["rope_parameters"] = {FULL: one, SLIDING: local} if by_layer else one
            if by_layer and self.default_local and not self.local:
                del found["rope_scaling"]  # transformers would read it in place of the objects
        return found


class Unrotated(NamedTuple):
    """The layers without a rotary embedding."""

    def read(self, config: Config, fields: Values) -> None:
        number, given = fields["num_layers"], config.get("no_rope_layers")
        interval = config.value("no_rope_layer_interval", int, 4)
        if interval < 1:
            raise ValueError(f"no_rope_layer_interval must be at least 1 (got {interval})")
        if given is None:
            given = [int((layer + 1) % interval != 0) for layer in range(number)]
        if not isinstance(given, list) or [one in (0, 1) for one in given] != [True] * number:
            raise ValueError(
                f"no_rope_layers must have a 0 or a 1 for each of {number} layers (got "
                f"{quoted(given)})"
            )
        if not all(given):  # 1 means that the layer does have a rotary embedding
            fields["no_rope_freq"] = tuple(1 - int(has) for has in given)

    def write(self, model: ModelConfig) -> Values:
        layers = range(model.num_layers)
        return {"no_rope_layers": [int(model.layer_rotates(layer)) for layer in layers]}


def _whole_number(key: str, value: Any) -> int:
    """Returns a number that may be written as a float but must be whole."""
    is_whole = type(value) is float and value.is_integer()
    return as_whole(int(value) if is_whole else value, key, -MOST_SIZE, MOST_SIZE)
