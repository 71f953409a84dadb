"""Runs the layers of a stage as a plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.rng import RngStreams
from megatron_lite.recompute.checkpoint import checkpoint
from megatron_lite.recompute.ops import KeptResults, keep_results
from megatron_lite.recompute.plan import RecomputePlan, Segment
from megatron_lite.recompute.regions import Regions
from megatron_lite.recompute.stores import Stores
from megatron_lite.recompute.verify import Record

Layer = Callable[..., Tensor]


def run_layers(plan: RecomputePlan, layers: Sequence[Layer], hidden_states: Tensor, *extras: Any, rng: RngStreams,
               tp_group: ProcessGroup | None, stores: Stores | None = None) -> Tensor:
    """hidden_states through all layers: `layer(hidden_states, *extras, regions)` each, [s/t or s, b, h] in and out.

    Of a unit only its input is kept: whole, or this TP rank's 1/t of it where the plan splits it. Then backward gathers it, and
    starts the gather of the unit before beside its replay. stores: the model's, whose memory every forward uses again.
    """
    assert plan.num_layers == len(layers), (plan, len(layers))
    tp_size = 1 if tp_group is None else tp_group.size()
    split_before = None
    with (stores or Stores(hidden_states.device)).forward(plan, hidden_states, tp_size) as opened:
        for segment in plan.segments:
            part = layers[segment.first_layer : segment.first_layer + segment.num_layers]
            with opened(segment, (part, extras)):
                hidden_states = _run(plan, segment, part, hidden_states, *extras, rng=rng, previous=split_before,
                                     split_group=tp_group if segment.split else None)
            split_before = hidden_states.grad_fn if segment.split else split_before
    return hidden_states


def _run(plan: RecomputePlan, segment: Segment, layers: Sequence[Layer], *args: Any, rng: RngStreams,
         split_group: ProcessGroup | None, previous: Any) -> Tensor:
    """One segment. previous: the grad_fn of the last split unit."""
    if not segment.unit and not segment.ops:
        return _chain(plan, segment, layers, rng)(*args)
    record = Record(_name(segment), rng) if plan.verify else None
    results = KeptResults(segment.ops, skip_tail=plan.skip_tail) if segment.ops else None
    forward = _chain(plan, segment, layers, rng, record=record, results=results)
    forward = forward if record is None else record.watch(forward)
    replay = _chain(plan, segment, layers, rng, output_unread=True, results=results) if plan.skip_tail else None
    if results is not None:
        return keep_results(forward, *args, results=results, rng=rng, replay=replay)
    return checkpoint(forward, *args, rng=rng, replay=replay, split_group=split_group,
                      previous=previous if segment.split else None)


def _chain(plan: RecomputePlan, segment: Segment, layers: Sequence[Layer], rng: RngStreams, *, output_unread: bool = False,
           record: Record | None = None, results: KeptResults | None = None) -> Layer:
    def run(hidden_states: Tensor, *extras: Any) -> Tensor:
        for number, layer in enumerate(layers):
            regions = Regions(rebuilt=segment.regions, rng=rng, layer=segment.first_layer + number, skip_tail=plan.skip_tail,
                              verify=plan.verify, output_unread=output_unread and number == len(layers) - 1, record=record,
                              results=results)
            with regions.opened():
                hidden_states = regions.noted("output", layer(hidden_states, *extras, regions))
        return hidden_states

    return run


def _name(segment: Segment) -> str:
    last = segment.first_layer + segment.num_layers - 1
    return f"layer {last}" if segment.num_layers == 1 else f"unit of layers {segment.first_layer}-{last}"
