"""The collectives of one micro-batch on one rank, by rule: which part of a layer issues which, forward and backward.

                          forward              backward
    column (qkv, fc1)     -                    all-reduce of dx
    row    (proj, fc2)    all-reduce           -
    under sequence parallelism
    column                all-gather of x      all-gather of x again, reduce-scatter of dx
    row                   reduce-scatter       all-gather of dy

Each is of a whole [s, b, h], under context parallelism of s/c. Attention over c ranks exchanges keys and values, of which each
rank has a part of 2 s/c b g/t d:

    p2p                   c - 1 shifts         2 c - 1 shifts                                each of a part
    allgather             all-gather           all-gather, reduce-scatter                    of all parts
    unfused               all-gather           reduce-scatter                                of all parts

A replay repeats the forward's, but for that of its last fc2 where the tail is skipped, and those whose results an `ops(...)`
policy keeps; of an input that is split over the ranks, it begins with a gather. What is reduced once per step (gradients) is not
here. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.memory.layer_operators import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    CONTEXT_PARALLEL_ATTENTION,
    CORE,
    REDUCE_SCATTER,
    Result,
    repeated_results,
)
from megatron_lite.memory.layer_tensors import Sizes
from megatron_lite.recompute.plan import CORE_ATTENTION, MLP_REGION, RecomputePlan, Segment

SHIFT = "ring shift"


class Collective(NamedTuple):
    """num_bytes: of the whole tensor. A rank of n receives (n-1)/n of it, twice that in an all-reduce, and all in a shift."""

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
    column, core, row = _column(model, sizes), _core(model, sizes), _row(model, sizes)
    mlp = column + row
    layer = column + core + row + mlp
    has_tail = segment.unit or MLP_REGION in segment.regions
    replay = layer.forward * segment.num_layers if segment.unit else (
        core.forward * (CORE_ATTENTION in segment.regions) + mlp.forward * (MLP_REGION in segment.regions))
    if segment.ops:
        repeated = repeated_results(model, segment.ops, sizes, skip_tail=plan.skip_tail)
        replay = tuple(sent for one in repeated for sent in _of_result(one, model, sizes))
    elif has_tail and plan.skip_tail:
        replay = replay[: len(replay) - len(row.forward)]
    if segment.split:
        replay = (_hidden(ALL_GATHER, model, sizes), *replay)
    return Exchange(layer.forward * segment.num_layers, layer.backward * segment.num_layers, replay)


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


def _core(model: ModelConfig, sizes: Sizes) -> Exchange:
    """Of attention over context-parallel ranks."""
    if sizes.cp_size == 1:
        return Exchange()
    num_bytes = 2 * sizes.tokens * model.query_groups * model.head_dim // sizes.tp_size * sizes.element_bytes
    gather = Collective(ALL_GATHER, sizes.cp_size * num_bytes)
    scatter = Collective(REDUCE_SCATTER, sizes.cp_size * num_bytes)
    if model.builds_scores(sizes.device):
        return Exchange(forward=(gather,), backward=(scatter,))
    if sizes.cp_comm_type == "allgather":
        return Exchange(forward=(gather,), backward=(gather, scatter))
    shift = Collective(SHIFT, num_bytes)
    return Exchange(forward=(shift,) * (sizes.cp_size - 1), backward=(shift,) * (2 * sizes.cp_size - 1))


def _of_result(result: Result, model: ModelConfig, sizes: Sizes) -> tuple[Collective, ...]:
    """What is sent where an operator runs again."""
    if result.operation == CORE:
        sends = result.operator in COLLECTIVES or result.operator == CONTEXT_PARALLEL_ATTENTION
        return _core(model, sizes).forward if sends else ()
    return (_hidden(COLLECTIVES[result.operator], model, sizes),) if result.operator in COLLECTIVES else ()


def _hidden(kind: str, model: ModelConfig, sizes: Sizes) -> Collective:
    return Collective(kind, sizes.tokens * model.hidden_size * sizes.element_bytes)
