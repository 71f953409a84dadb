"""The collectives that each part of the model issues, for one micro-batch on one rank.

A replay issues the same collectives as the forward, with three exceptions: the one after the last
fc2 if its output is skipped; those whose results an `ops(...)` policy keeps; and an additional
all-gather first if the unit's input was split over the ranks. The reductions of gradients, once per
step, are not included. The collectives come from description/. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.operations import ALL_GATHER, Collective, LayerDescription, Operation
from megatron_lite.description.shape import Shape
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.replays import replayed_calls
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment


@dataclass(frozen=True)
class Traffic:
    """The collectives of a part of the model. replay: those that backward issues while it
    rebuilds."""

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    replay: tuple[Collective, ...] = ()

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.forward + other.forward, self.backward + other.backward, self.replay + other.replay
        )


def segment_collectives(
    model: ModelConfig,
    plan: RecomputePlan,
    segment: Segment,
    sizes: Sizes,
    layers: tuple[LayerDescription, ...],
) -> Traffic:
    """Returns the collectives of all layers of one segment. layers: those of the whole plan."""
    own = layers[segment.first_layer : segment.first_layer + segment.num_layers]
    replay = tuple(
        collective
        for _, _, call in replayed_calls(own, segment, skip_tail=plan.skip_tail)
        for collective in call.collectives
    )
    if segment.split:
        replay = (Collective(ALL_GATHER, Shape(model, sizes).whole), *replay)
    traffic = _of_operations(operation for layer in own for operation in layer.operations)
    return Traffic(traffic.forward, traffic.backward, replay)


def embedding_collectives(model: ModelConfig, sizes: Sizes) -> Traffic:
    """Returns the collectives of the embedding."""
    return _of_operations(embedding_operations(model, sizes))


def head_collectives(model: ModelConfig, sizes: Sizes) -> Traffic:
    """Returns the collectives of the final norm, the logits and the loss."""
    return _of_operations(head_operations(model, sizes))


def _of_operations(operations: Iterable[Operation]) -> Traffic:
    operations = tuple(operations)
    return Traffic(
        tuple(collective for operation in operations for collective in operation.forward),
        tuple(collective for operation in operations for collective in operation.backward),
    )
