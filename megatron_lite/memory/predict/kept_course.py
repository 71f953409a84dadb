"""The course of the bytes kept for backward: they rise in the forward of a micro-batch, and fall
in its backward.

The points are those that a memory timeline can be compared with (memory/measure/timeline.py):

    forward     the layer's forward has ended: what all layers up to it keep
    replay      the fullest moment of the backward of some layers, which rebuild tensors
    backward    the backward of the layers has ended: what the layers before them keep

Gradients and tensors that live while one operation runs are not among the bytes. Standard library
only.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.kept_tensors import EMBEDDING, activation_terms
from megatron_lite.memory.predict.peak import moments
from megatron_lite.recompute.recompute_plan import RecomputePlan


class KeptPoint(NamedTuple):
    """The bytes on the device at one moment.

    phase: "forward", "replay" or "backward"; see above.
    first_layer, last_layer: the layers that have just run. Both are -1 when the whole forward has
        ended, with the output layer and the loss.
    """

    phase: str
    first_layer: int
    last_layer: int
    num_bytes: int


def kept_course(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> tuple[KeptPoint, ...]:
    """Returns the points of one micro-batch on one stage, in the order of the step."""
    terms = [term for term in activation_terms(model, plan, sizes) if not term.on_host]
    after = [sum(term.num_bytes for term in terms if term.operation == EMBEDDING)]
    for layer in range(plan.num_layers):
        own = sum(term.num_bytes for term in terms if term.layer == layer)
        after.append(after[-1] + own)
    points = [
        KeptPoint("forward", layer, layer, after[layer + 1]) for layer in range(plan.num_layers)
    ]
    points.append(KeptPoint("forward", -1, -1, sum(term.num_bytes for term in terms)))
    # The moment at the end of the forward has the key None, which no segment asks for.
    fullest = {moment.first_layer: moment.held_bytes for moment in moments(model, plan, sizes)}
    for segment in reversed(plan.segments):
        first, last = segment.first_layer, segment.first_layer + segment.num_layers - 1
        if first in fullest:
            points.append(KeptPoint("replay", first, last, fullest[first]))
        points.append(KeptPoint("backward", first, last, after[first]))
    return tuple(points)
