"""The collectives that each part of the model issues, for one micro-batch on one rank.

A replay issues the same collectives as the forward, with three exceptions: the one after the last
fc2 if its output is skipped; those whose results an `ops(...)` policy keeps; and an additional
all-gather first if the unit's input was split over the ranks. The reductions of gradients, once per
step, are not included. The collectives come from description/. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_lite.description.operations import ALL_GATHER, Collective, LayerDescription, Operation
from megatron_lite.description.shape import Shape
from megatron_lite.memory.predict.replays import replayed_calls
from megatron_lite.recompute.recompute_plan import Segment


class Traffic(NamedTuple):
    """The collectives of a part of the model. replay: those that backward issues while it
    rebuilds."""

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    replay: tuple[Collective, ...] = ()


def collectives(operations: Iterable[Operation]) -> Traffic:
    """Returns the collectives of some operations without a replay."""
    operations = tuple(operations)
    return Traffic(
        tuple(collective for operation in operations for collective in operation.forward),
        tuple(collective for operation in operations for collective in operation.backward),
    )


def segment_collectives(
    of: Shape, segment: Segment, layers: Sequence[LayerDescription], *, skip_tail: bool
) -> Traffic:
    """Returns the collectives of all layers of one segment. layers: those of the segment."""
    replay = tuple(
        collective
        for _, _, call in replayed_calls(layers, segment, skip_tail=skip_tail)
        for collective in call.collectives
    )
    if segment.split:
        replay = (Collective(ALL_GATHER, of.whole), *replay)
    plain = collectives(operation for layer in layers for operation in layer.operations)
    return plain._replace(replay=replay)
