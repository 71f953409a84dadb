"""The rotary embedding in a Hugging Face config.json: its base, its scaling, and who has one.

Older files have rope_theta and rope_scaling, newer ones an object rope_parameters. Both are read,
and the older keys are written, which every version reads. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lite.config.hf_values import KeyRule, object_of, value_of, whole_number
from megatron_lite.config.json_text import shown
from megatron_lite.config.layer_pattern import marks
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.rotary_scaling import FAST_TURNS, ORIGINAL_LENGTH, SLOW_TURNS

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
