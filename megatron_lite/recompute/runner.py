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
from megatron_lite.recompute.verify import Record

Layer = Callable[..., Tensor]


def run_layers(plan: RecomputePlan, layers: Sequence[Layer], hidden_states: Tensor, *extras: Any, rng: RngStreams,
               tp_group: ProcessGroup | None) -> Tensor:
    """hidden_states through all layers: `layer(hidden_states, *extras, regions)` each, [s/t or s, b, h] in and out.

    Of a unit only its input is kept: whole, or this TP rank's 1/t of it where the plan splits it. Then backward gathers it, and
    starts the gather of the unit before beside its replay.
    """
    assert plan.num_layers == len(layers), (plan, len(layers))
    split_before = None
    for segment in plan.segments:
        part = layers[segment.first_layer : segment.first_layer + segment.num_layers]
        if not segment.unit:
            hidden_states = _chain(plan, segment, part, rng)(hidden_states, *extras)
            continue
        record = Record(_name(segment), rng) if plan.verify else None
        forward = _chain(plan, segment, part, rng, record=record)
        replay = _chain(plan, segment, part, rng, output_unread=True) if plan.skip_tail else None
        split = segment.split
        hidden_states = checkpoint(forward if record is None else record.watch(forward), hidden_states, *extras, rng=rng,
                                   replay=replay, split_group=tp_group if split else None,
                                   previous=split_before if split else None)
        split_before = hidden_states.grad_fn if split else split_before
    return hidden_states


def _chain(plan: RecomputePlan, segment: Segment, layers: Sequence[Layer], rng: RngStreams, *, output_unread: bool = False,
           record: Record | None = None) -> Layer:
    def run(hidden_states: Tensor, *extras: Any) -> Tensor:
        for number, layer in enumerate(layers):
            regions = Regions(rebuilt=segment.regions, rng=rng, layer=segment.first_layer + number, skip_tail=plan.skip_tail,
                              verify=plan.verify, output_unread=output_unread and number == len(layers) - 1, record=record)
            with regions.opened():
                hidden_states = regions.noted("output", layer(hidden_states, *extras, regions))
        return hidden_states

    return run


def _name(segment: Segment) -> str:
    last = segment.first_layer + segment.num_layers - 1
    return f"layer {last}" if segment.num_layers == 1 else f"unit of layers {segment.first_layer}-{last}"
