"""Runs the layers of a stage as a plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.rng import RngStreams
from megatron_lite.recompute.checkpoint import checkpoint
from megatron_lite.recompute.plan import RecomputePlan, Segment
from megatron_lite.recompute.regions import Regions


def run_layers(plan: RecomputePlan, layers: Sequence[Callable[..., Tensor]], hidden_states: Tensor, *extras: Any,
               rng: RngStreams, tp_group: ProcessGroup | None) -> Tensor:
    """hidden_states through all layers: `layer(hidden_states, *extras, regions)` each, [s/t or s, b, h] in and out.

    Of a unit only its input is kept: whole, or this TP rank's 1/t of it where the plan splits it.
    """
    assert plan.num_layers == len(layers), (plan, len(layers))
    for segment in plan.segments:
        run = _chain(layers[segment.first_layer : segment.first_layer + segment.num_layers], Regions(segment.regions, rng))
        if segment.unit:
            hidden_states = checkpoint(run, hidden_states, *extras, rng=rng, split_group=_split_group(segment, tp_group))
        else:
            hidden_states = run(hidden_states, *extras)
    return hidden_states


def _chain(layers: Sequence[Callable[..., Tensor]], regions: Regions) -> Callable[..., Tensor]:
    def run(hidden_states: Tensor, *extras: Any) -> Tensor:
        for layer in layers:
            hidden_states = layer(hidden_states, *extras, regions)
        return hidden_states

    return run


def _split_group(segment: Segment, tp_group: ProcessGroup | None) -> ProcessGroup | None:
    return tp_group if segment.store == "split" else None
