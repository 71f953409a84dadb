"""How the model hands its parts to the plan: it names a region and runs it through here, and knows nothing of recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_lite.parallel.rng import RngStreams
from megatron_lite.recompute.checkpoint import checkpoint

CORE_ATTENTION, MLP_REGION = "core_attn", "mlp"


@dataclass(frozen=True)
class Regions:
    """The regions of one layer that are rebuilt in backward. An argument of a layer's forward, so that a replay inside a unit, or
    another micro-batch, may have others."""

    rebuilt: frozenset[str]
    rng: RngStreams

    def run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`; if the region is rebuilt, only its arguments are kept."""
        return checkpoint(function, *args, rng=self.rng) if name in self.rebuilt else function(*args)
