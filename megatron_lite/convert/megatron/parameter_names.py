"""The parameters' names of Megatron-LM's releases, as the names of this project.

    release         names                                      norms before attention and MLP
    Megatron core   decoder.layers.0.mlp.linear_fc1.weight     of their own (local spec), or parts
                                                               of linear_qkv and linear_fc1 (TE)
    before          language_model.encoder.layers.0.mlp.dense_h_to_4h.weight

A torch_dist checkpoint may leave out the layer's number and stack all layers in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

MOST_DEPTH, LONGEST_NAME = 8, 1000
LAYERS = "decoder.layers."
LAYER_NUMBER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
# Tensors without weights. TE keeps its FP8 scales as `_extra_state`, old releases their tables of
# the rotary embedding.
NO_WEIGHTS = re.compile(r"(.*\.)?(_extra_state(/.*)?|inv_freq|masked_bias)")
PREFIXES = (
    ("language_model.embedding.", "embedding."),
    ("language_model.encoder.", LAYERS.removesuffix("layers.")),
    ("language_model.transformer.", LAYERS.removesuffix("layers.")),
    ("language_model.output_layer.", "output_layer."),
    ("word_embeddings_for_head.", "output_layer."),
)
PARTS = (
    ("decoder.final_norm.", "decoder.final_layernorm."),
    (".attention.", ".self_attention."),
    (".input_norm.", ".input_layernorm."),
    (".post_attention_norm.", ".pre_mlp_layernorm."),
    (".post_attention_layernorm.", ".pre_mlp_layernorm."),
    (".self_attention.query_key_value.", ".self_attention.linear_qkv."),
    (".self_attention.dense.", ".self_attention.linear_proj."),
    (".mlp.dense_h_to_4h.", ".mlp.linear_fc1."),
    (".mlp.dense_4h_to_h.", ".mlp.linear_fc2."),
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
OUTPUT = "output_layer.weight"


class LayerName(NamedTuple):
    """A parameter's name without its layer, and the layer's number; None outside of a layer.

    In a stacked name the number is None too, and `stacked` is true.
    """

    name: str
    layer: int | None = None
    stacked: bool = False

    def whole(self, first_layer: int = 0) -> str:
        """Returns the name in the whole model. first_layer: the number of its stage's layer 0."""
        return self.name if self.layer is None else layer_name(first_layer + self.layer, self.name)


def layer_name(layer: int, name: str) -> str:
    """Returns the name of a parameter of a layer."""
    return f"{LAYERS}{layer}.{name}"


def our_name(name: str) -> LayerName | None:
    """Returns the name here of a parameter in a checkpoint; None if it is no weight."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    if NO_WEIGHTS.fullmatch(name):
        return None
    for old, new in PREFIXES:
        if name.startswith(old):
            name = new + name.removeprefix(old)
    for old, new in PARTS:
        name = name.replace(old, new)
    if (found := LAYER_NUMBER.fullmatch(name)) is not None:
        return LayerName(found[2], int(found[1]))
    if name.startswith(LAYERS):
        return LayerName(name.removeprefix(LAYERS), stacked=True)
    return LayerName(name)


def stacked_name(name: str) -> tuple[str, int | None]:
    """Returns a parameter's name without the number of its layer, and the number."""
    found = LAYER_NUMBER.fullmatch(name)
    return (name, None) if found is None else (LAYERS + found[2], int(found[1]))


def flat(values: Mapping[Any, Any], seen: set[int]) -> dict[str, Any]:
    """Returns the values of nested dicts under their keys, joined with points.

    seen: the ids of all dicts that were read before, to which it adds its own.
    Raises ValueError on more levels or longer names than any model has, and for a dict that is
    read twice: a small file can hold one dict at very many places.
    """
    found: dict[str, Any] = {}
    _flatten(values, "", 0, found, seen)
    return found


def _flatten(
    values: Mapping[Any, Any], prefix: str, depth: int, found: dict[str, Any], seen: set[int]
) -> None:
    if depth > MOST_DEPTH or len(prefix) > LONGEST_NAME:
        raise ValueError(
            f"a state dict has more than {MOST_DEPTH} levels or names of {LONGEST_NAME} characters"
        )
    if values and id(values) in seen:
        raise ValueError("a state dict is at two places")
    seen.add(id(values))
    for key, value in values.items():
        if isinstance(value, dict):
            _flatten(value, f"{prefix}{str(key)[:LONGEST_NAME]}.", depth + 1, found, seen)
        elif isinstance(key, str):
            found[f"{prefix}{key[:LONGEST_NAME]}"] = value
