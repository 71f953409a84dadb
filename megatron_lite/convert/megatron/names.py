"""The parameters' names of Megatron-LM's releases, as the names of this project, and their order.

    release         names                                      norms before attention and MLP
    Megatron core   decoder.layers.0.mlp.linear_fc1.weight     of their own (local spec), or parts
                                                               of linear_qkv and linear_fc1 (TE)
    before          language_model.encoder.layers.0.mlp.dense_h_to_4h.weight

A torch_dist checkpoint may leave out the layer's number and stack all layers in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_lite.convert.weights import LAYERS, layer_of

LONGEST_NAME = 1000
# Tensors without weights. TE keeps its FP8 scales as `_extra_state`, old releases their tables of
# the rotary embedding.
NO_WEIGHTS = re.compile(r"(.*\.)?(_extra_state(/.*)?|inv_freq|masked_bias)")
# Parts of names there and here, replaced in this order. A name begins with a point meanwhile.
OLDER = (
    (".language_model.embedding.", ".embedding."),
    (".language_model.encoder.", ".decoder."),
    (".language_model.transformer.", ".decoder."),
    (".language_model.output_layer.", ".output_layer."),
    (".word_embeddings_for_head.", ".output_layer."),
    (".decoder.final_norm.", ".decoder.final_layernorm."),
    (".attention.", ".self_attention."),
    (".input_norm.", ".input_layernorm."),
    (".post_attention_norm.", ".pre_mlp_layernorm."),
    (".post_attention_layernorm.", ".pre_mlp_layernorm."),
    (".self_attention.query_key_value.", ".self_attention.linear_qkv."),
    (".self_attention.dense.", ".self_attention.linear_proj."),
    (".mlp.dense_h_to_4h.", ".mlp.linear_fc1."),
    (".mlp.dense_4h_to_h.", ".mlp.linear_fc2."),
)
# TE's fused layers hold the norms before them. torch_dist has these names for any layer spec.
FUSED_NORMS = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
# The modules of a layer that have an `_extra_state`, which is empty without FP8.
LINEARS = (
    *("self_attention.linear_qkv", "self_attention.linear_proj"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
EXTRA_STATE = "_extra_state"
# The order of a layer's modules in Megatron-LM, which numbers the optimizer states.
ORDER = (
    *("input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv"),
    *("self_attention.q_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)


def our_name(name: str) -> str | None:
    """Returns the name here of a parameter in a checkpoint; None if it is no weight.

    A stacked name keeps no number: "decoder.layers.mlp.linear_fc1.weight".
    """
    name = re.sub(r"^(module\.)+", "", name)
    return None if NO_WEIGHTS.fullmatch(name) else _replaced(name, (*OLDER, *FUSED_NORMS))


def stacked_name(name: str) -> str:
    """Returns the name of a parameter here in a torch_dist checkpoint that stacks the layers."""
    layer, own = layer_of(name)
    if layer is None:
        return name
    return LAYERS + _replaced(own, ((ours, theirs) for theirs, ours in FUSED_NORMS))


def _replaced(name: str, parts: Iterable[tuple[str, str]]) -> str:
    name = f".{name}"
    for old, new in parts:
        name = name.replace(old, new)
    return name[1:]


def in_order(names: Iterable[str]) -> list[str]:
    """Returns the names of a model's parameters in the order of Megatron-LM's modules."""

    def place(name: str) -> tuple[int, int, int]:
        layer, rest = layer_of(name)
        if layer is None:
            return (0 if name.startswith("embedding.") else 2, 0, 0)
        module, _, part = rest.rpartition(".")
        # In each module the weight comes before the bias.
        return 1, layer, 2 * ORDER.index(module) + (part == "bias")

    return sorted(names, key=place)


def has_decay(name: str, num_dims: int) -> bool:
    """Returns whether Megatron's optimizer decays a parameter."""
    return num_dims > 1 and not name.endswith(".bias")


def flat(values: Mapping[Any, Any], seen: set[int], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested dicts with their keys, joined with points.

    seen: the ids of all dicts that were read before, to which it adds its own.
    Raises ValueError for a dict that is read twice: a small file can hold one at very many places.
    """
    if id(values) in seen:
        raise ValueError("a state dict is at two places")
    seen.add(id(values))
    for key, value in values.items():
        if isinstance(key, str):
            name = f"{prefix}{key[:LONGEST_NAME]}"
            if isinstance(value, dict):
                yield from flat(value, seen, f"{name}.")
            else:
                yield name, value
