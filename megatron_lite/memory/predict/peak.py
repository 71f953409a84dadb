"""The peak of activations: the most bytes that one rank holds for a micro-batch's backward.

It holds the tensors that are kept and not yet used, and those that a replay has rebuilt.

    the forward ends      all that is kept: activation_bytes
    a unit was replayed   what the layers before it keep, and all that the unit's layers save. Later
                          layers have freed their tensors by then.

A long unit keeps little and rebuilds much, so the second sum can be larger than the first.
Gradients and short-lived workspaces come on top of both: step_peak.py. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.kept_tensors import HEAD, activation_bytes, activation_terms
from megatron_lite.memory.predict.stage_course import stage_course
from megatron_lite.recompute.recompute_plan import RecomputePlan


class PeakMoment(NamedTuple):
    """A moment and the bytes held at it.

    first_layer, last_layer: the layers that were replayed, or whose tensors have come back from
        host memory; None at the end of the forward.
    """

    first_layer: int | None
    last_layer: int | None
    held_bytes: int


class KeptPoint(NamedTuple):
    """The bytes held for backward at one moment, for a memory timeline (measure/timeline.py).

    phase: "forward": the layer's forward has ended. "replay": the fullest moment of the backward of
        some layers, which rebuild tensors. "backward": it has ended.
    first_layer, last_layer: the layers that have just run. Both are -1 when the whole forward has
        ended, with the output layer and the loss.
    """

    phase: str
    first_layer: int
    last_layer: int
    num_bytes: int


def peak(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> PeakMoment:
    """Returns the moment at which the rank holds the most bytes."""
    return max(moments(model, plan, sizes), key=lambda moment: moment.held_bytes)


def moments(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> Iterator[PeakMoment]:
    """Yields the moments that can be the peak, in the order of the layers.

    They are the end of the forward, and the fullest moment of each segment's replay or return from
    host memory.
    """
    course = stage_course(model, replace(plan, contiguous=False), sizes)
    yield PeakMoment(None, None, activation_bytes(model, plan, sizes))
    for one in reversed(course.replays):
        yield PeakMoment(*one)


def kept_course(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> Iterator[KeptPoint]:
    """Yields the points of one micro-batch on one stage, in the order of the step."""
    course = stage_course(model, replace(plan, contiguous=False), sizes)
    terms = [
        (-1 if one.layer is None else one.layer, one.num_bytes)
        for one in activation_terms(model, plan, sizes)
        if not (one.on_host or one.operation == HEAD)
    ]
    kept = [  # after the embedding and after each layer
        sum(size for layer, size in terms if layer < number)
        for number in range(plan.num_layers + 1)
    ]
    for layer in range(plan.num_layers):
        yield KeptPoint("forward", layer, layer, kept[layer + 1])
    yield KeptPoint("forward", -1, -1, activation_bytes(model, plan, sizes))
    replays = {one.first_layer: one for one in course.replays}
    for segment in reversed(plan.segments):
        first, last = segment.first_layer, segment.first_layer + segment.num_layers - 1
        if first in replays:
            yield KeptPoint("replay", *replays[first])
        yield KeptPoint("backward", first, last, kept[first])
