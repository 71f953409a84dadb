"""The tensor-parallel collectives of one micro-batch on one rank, by rule: which linear issues which, forward and backward.

                          forward              backward
    column (qkv, fc1)     -                    all-reduce of dx
    row    (proj, fc2)    all-reduce           -
    under sequence parallelism
    column                all-gather of x      all-gather of x again, reduce-scatter of dx
    row                   reduce-scatter       all-gather of dy

Each is of a whole [s, b, h]. A replay repeats the forward's, but for that of its last fc2 where the tail is skipped, and those
whose results an `ops(...)` policy keeps; of an input that is split over the ranks, it begins with a gather. What is reduced once
per step (gradients) is not here. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.memory.layer_operators import ALL_GATHER, ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER, repeated_results
from megatron_lite.memory.layer_tensors import Sizes
from megatron_lite.recompute.plan import MLP_REGION, RecomputePlan, Segment


class Collective(NamedTuple):
    """num_bytes: of the whole tensor. A rank receives (t-1)/t of it, and twice that in an all-reduce."""

    kind: str
    num_bytes: int


@dataclass(frozen=True)
class Exchange:
    """What a part of the model issues. replay: in backward, while it rebuilds."""

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    replay: tuple[Collective, ...] = ()

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.forward + other.forward, self.backward + other.backward, self.replay + other.replay)


def plan_collectives(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> Exchange:
    """All of one micro-batch."""
    total = embedding_collectives(model, sizes)
    for segment in plan.segments:
        total += segment_collectives(model, plan, segment, sizes)
    return total + head_collectives(model, sizes)


def segment_collectives(model: ModelConfig, plan: RecomputePlan, segment: Segment, sizes: Sizes) -> Exchange:
    """Of all layers of one segment of the plan."""
    row = _row(model, sizes)
    half = _column(model, sizes) + row  # attention, or the MLP
    halves = 2 * segment.num_layers
    replay = half.forward * (halves if segment.unit else 1 if MLP_REGION in segment.regions else 0)
    if segment.ops:
        repeated = repeated_results(model, segment.ops, sizes, skip_tail=plan.skip_tail)
        replay = tuple(_hidden(COLLECTIVES[one.operator], model, sizes) for one in repeated if one.operator in COLLECTIVES)
    elif replay and plan.skip_tail:
        replay = replay[: -len(row.forward)]
    if segment.split:
        replay = (_hidden(ALL_GATHER, model, sizes), *replay)
    return Exchange(half.forward * halves, half.backward * halves, replay)


def embedding_collectives(model: ModelConfig, sizes: Sizes) -> Exchange:
    """The sum over the ranks' rows of the vocabulary."""
    return _row(model, sizes)


def head_collectives(model: ModelConfig, sizes: Sizes) -> Exchange:
    """The logits, and two sums of the cross-entropy: the maximum; the label's logit with the sum of exponentials."""
    if sizes.tp_size == 1:
        return Exchange()
    row = sizes.tokens * sizes.accumulate_bytes
    return _column(model, sizes) + Exchange(forward=(Collective(ALL_REDUCE, row), Collective(ALL_REDUCE, 2 * row)))


def _column(model: ModelConfig, sizes: Sizes) -> Exchange:
    if sizes.tp_size == 1:
        return Exchange()
    if not sizes.sequence_parallel:
        return Exchange(backward=(_hidden(ALL_REDUCE, model, sizes),))
    gather = _hidden(ALL_GATHER, model, sizes)
    return Exchange(forward=(gather,), backward=(gather, _hidden(REDUCE_SCATTER, model, sizes)))


def _row(model: ModelConfig, sizes: Sizes) -> Exchange:
    if sizes.tp_size == 1:
        return Exchange()
    if not sizes.sequence_parallel:
        return Exchange(forward=(_hidden(ALL_REDUCE, model, sizes),))
    return Exchange(forward=(_hidden(REDUCE_SCATTER, model, sizes),), backward=(_hidden(ALL_GATHER, model, sizes),))


def _hidden(kind: str, model: ModelConfig, sizes: Sizes) -> Collective:
    return Collective(kind, sizes.tokens * model.hidden_size * sizes.element_bytes)
