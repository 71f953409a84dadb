"""The parts of a layer whose saved tensors a policy can keep in host memory: `@host(core_attn)`.

A part is a module. A tensor belongs to the module that saves it first: the input of linear_qkv
belongs to qkv_linear, and queries, keys and values belong to core_attn. Megatron's
`--offload-modules` has the first five names. Standard library only.
"""

from __future__ import annotations

# By name: the module, by its name within the layer.
PARTS = {
    "attn_norm": "input_layernorm",
    "qkv_linear": "self_attention.linear_qkv",
    "core_attn": "self_attention.core_attention",
    "attn_proj": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "linear_fc1": "mlp.linear_fc1",
    "activation": "mlp",
    "linear_fc2": "mlp.linear_fc2",
}
MEGATRON_PARTS = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
# A part whose only saved tensor is one that another part saves first, with that other part.
SAVED_WITH = {"attn_proj": "core_attn"}

# The parts that a layer lacks under --norm-position after.
NORM_PARTS = ("attn_norm", "mlp_norm")


def is_on_host(store: str) -> bool:
    """Returns whether a store of a policy keeps anything in host memory."""
    return store.endswith("host") or bool(parts_of(store))


def parts_of(store: str) -> tuple[str, ...]:
    """Returns the parts of "host(attn_norm+core_attn)"; () for a store that names no parts."""
    if not store.startswith("host("):
        return ()
    return tuple(store.removeprefix("host(").removesuffix(")").split("+"))


def modules_of(store: str) -> frozenset[str]:
    """Returns the modules of the parts, by their names within the layer."""
    return frozenset(PARTS[name] for name in parts_of(store))


def store_of(parts: tuple[str, ...]) -> str:
    """Returns the store that keeps these parts in host memory, in its normal spelling."""
    return f"host({'+'.join(name for name in PARTS if name in parts)})"
