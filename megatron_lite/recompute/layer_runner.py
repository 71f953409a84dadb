"""Runs the layers of a stage as its recompute plan requires."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.config.regions import MOE
from megatron_lite.parallel.rng import RngStreams

from .recompute_plan import RecomputePlan, Segment
from .region_runner import Choices, Regions

if TYPE_CHECKING:
    from .checkpoint import Record
    from .ops import KeptResults
    from .stores import Opened, Stores

Layer = Callable[..., Tensor]


def run_layers(
    plan: RecomputePlan,
    layers: Sequence[Layer],
    hidden_states: Tensor,
    *extras: Any,
    rng: RngStreams,
    tp_group: ProcessGroup | None,
    stores: Stores | None = None,
) -> Tensor:
    """Returns hidden_states after all layers. Input and output are [s/t or s, b, h].

    Each layer is called as `layer(hidden_states, *extras, regions)`.

    A unit keeps only its input. If the plan splits that input, this TP rank keeps 1/t of it, and
    backward all-gathers it. Backward of one split unit also starts the all-gather for the split
    unit before it, so that this gather runs beside the replay.

    stores: the model's memory for kept tensors, if the plan uses it: every forward uses it again.
    """
    assert plan.num_layers == len(layers), (plan, len(layers))
    split_before: Any = None  # the grad_fn of the last split unit
    around: AbstractContextManager[Opened | None] = nullcontext()
    if stores and torch.is_grad_enabled():
        around = stores.forward(plan, hidden_states, tp_group.size() if tp_group else 1)

    def rebuilt(segment: Segment, chain: Callable[..., Layer]) -> Tensor:
        """Runs a segment so that backward runs it again. chain: returns what runs its layers."""
        # What few policies need is imported late.
        record, results = None, None
        if plan.verify:
            from .checkpoint import Record

            record = Record(_name(segment), rng)
        if segment.ops:
            from .hooked import How, rebuild_saved
            from .ops import KeptResults

            results = KeptResults(segment.ops, skip_tail=plan.skip_tail)
        # A verified replay must be the forward itself, with nothing left out. A plan with `verify`
        # has no `skip_tail`, so `replay` is None below and the engine runs `forward` again.
        forward = chain(record=record, results=results)
        forward = record.recorded(forward) if record else forward
        replay = chain(skip_layer_tail=True, results=results) if plan.skip_tail else None
        if not results:
            from .checkpoint import checkpoint

            return checkpoint(
                forward,
                hidden_states,
                *extras,
                rng=rng,
                replay=replay,
                split_group=tp_group if segment.split else None,
                previous=split_before,
            )

        # The tables that the model holds anyway are bound to the function: they are not arguments,
        # so the engine does not keep them a second time.
        def bound(layer: Layer) -> Layer:
            return lambda hidden_states: layer(hidden_states, *extras)

        how = How(name=_name(segment), results=results, rng=rng, replay=replay and bound(replay))
        return rebuild_saved(bound(forward), (hidden_states,), {}, how)

    with around as opened:
        for segment in plan.segments:
            # Outside of the stores: they stay on the device. A region without the router keeps
            # `Regions` among its arguments, and so these.
            choices = Choices(is_replayed=segment.is_whole or MOE in segment.regions)
            part = layers[segment.first_layer : segment.first_layer + segment.num_layers]
            chain = partial(_chain, plan, segment, part, rng, choices)
            with opened(segment, (part, extras)) if opened else nullcontext():
                if segment.is_whole and torch.is_grad_enabled():
                    hidden_states = rebuilt(segment, chain)
                else:
                    hidden_states = chain()(hidden_states, *extras)
            # Segments that are not split may lie between: the next gather is the last split one's.
            split_before = hidden_states.grad_fn if segment.split else split_before
    return hidden_states


def _chain(
    plan: RecomputePlan,
    segment: Segment,
    layers: Sequence[Layer],
    rng: RngStreams,
    choices: Choices,
    *,
    skip_layer_tail: bool = False,
    record: Record | None = None,
    results: KeptResults | None = None,
) -> Layer:
    # Only the last layer of a unit has an output that backward does not read. The outputs of the
    # layers before it are inputs of the next layer, so they are computed in full.
    def run(hidden_states: Tensor, *extras: Any) -> Tensor:
        for number, layer in enumerate(layers):
            regions = Regions(
                rebuilt=segment.rebuilt,
                tiles=segment.tiles,
                rng=rng,
                layer=segment.first_layer + number,
                skip_region_tails=plan.skip_tail,
                verify=plan.verify,
                skip_layer_tail=skip_layer_tail and number == len(layers) - 1,
                record=record,
                results=results,
                choices=choices,
            )
            with regions.opened():
                hidden_states = regions.noted("output", layer(hidden_states, *extras, regions))
        return hidden_states

    return run


def _name(segment: Segment) -> str:
    last = segment.numbers[-1]
    return (
        f"layer {last}"
        if segment.num_layers == 1
        else f"unit of layers {segment.first_layer}-{last}"
    )
