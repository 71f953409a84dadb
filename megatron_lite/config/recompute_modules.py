"""The regions of a layer that `--recompute-modules` and `--recompute-policy` name."""

from __future__ import annotations

MODULES = ("core_attn", "layernorm", "mlp", "activation", "dropout")
POINTWISE = ("layernorm", "activation", "dropout")
