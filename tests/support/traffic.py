"""The collectives of a whole model, as the sum of those of its parts."""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.predict.traffic import (
    Traffic,
    embedding_collectives,
    head_collectives,
    segment_collectives,
)
from megatron_lite.recompute.recompute_plan import RecomputePlan


def plan_collectives(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> Traffic:
    """Returns all collectives of one micro-batch."""
    layers = describe_layers(model, sizes, plan.num_layers)
    total = embedding_collectives(model, sizes)
    for segment in plan.segments:
        total += segment_collectives(model, plan, segment, sizes, layers)
    return total + head_collectives(model, sizes)
