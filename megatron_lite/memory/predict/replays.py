"""The operator calls of a layer that run again in backward, and those whose results are kept.

FLOPs, collectives and the report of a plan are sums over `replayed_calls`.

A replay issues the same collectives as the forward, with three exceptions: the one after the last
fc2 if its output is skipped; those whose results an `ops(...)` policy keeps; and an additional
all-gather first if the unit's input was split over the ranks. Collectives are those of one
micro-batch on one rank, without the reductions of gradients. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_lite.config.policy import Choice
from megatron_lite.description.operations import (
    ALL_GATHER,
    Collective,
    LayerDescription,
    Operation,
    OperatorCall,
)
from megatron_lite.description.shape import Shape
from megatron_lite.recompute.recompute_plan import Segment


class ReplayedCall(NamedTuple):
    """A call of an operation. layer: the position of its layer in the segment."""

    layer: int
    operation: Operation
    call: OperatorCall


def replayed_calls(
    layers: Sequence[LayerDescription], segment: Segment, *, skip_tail: bool
) -> Iterator[ReplayedCall]:
    """Yields the calls of the segment's layers that backward runs again, in the order of the
    forward.

    layers: the descriptions of the segment's layers.
    """
    for number, layer in enumerate(layers):
        if segment.ops:
            yield from (
                ReplayedCall(number, *one)
                for one, kept in _chosen(layer, segment.ops, skip_tail)
                if not kept
            )
            continue
        skipped: set[tuple[str, int]] = set()
        if skip_tail and segment.unit and number == len(layers) - 1:
            skipped |= layer.tail()
        # Only the output of a unit or region depends on its last matmul, and nothing reads the
        # output of a replay.
        in_region = set(skipped)
        for region in segment.rebuilt if skip_tail else ():
            in_region |= layer.tail(region)
        # A unit's replay runs its regions in full, which run once more in their backward, except
        # the one at its end, of which nothing reads the output.
        is_end = skip_tail and number == len(layers) - 1
        for operation in layer.operations:
            again = not segment.rebuilt.isdisjoint(operation.regions)
            runs = [skipped] * (segment.unit and not (again and is_end)) + [in_region] * again
            for left_out in runs:
                yield from (
                    ReplayedCall(number, operation, call)
                    for position, call in enumerate(operation.calls)
                    if (operation.name, position) not in left_out and not call.once
                )


def replayed_operations(
    layers: Sequence[LayerDescription], segment: Segment, *, skip_tail: bool
) -> list[Operation]:
    """Returns the operations whose kernels besides matmuls and collectives run in a replay.

    layers: the descriptions of the segment's layers.
    """
    again = [operation for layer in layers for operation in layer.operations]
    if not (segment.unit or segment.ops):
        return [one for one in again if not segment.regions.isdisjoint(one.regions)]
    # the last operation adds the output of the tail to the residual
    return again[:-1] if skip_tail else again


def kept_calls(
    layer: LayerDescription, ops: Sequence[str], *, skip_tail: bool
) -> list[tuple[Operation, OperatorCall]]:
    """Returns the calls of a layer whose results an `ops(...)` policy keeps."""
    return [one for one, kept in _chosen(layer, ops, skip_tail) if kept]


def _chosen(
    layer: LayerDescription, ops: Sequence[str], skip_tail: bool
) -> Iterator[tuple[tuple[Operation, OperatorCall], bool]]:
    """Yields each call with whether its result is kept. A tail that is skipped is neither kept nor
    run again."""
    choice, tail = Choice(ops), layer.tail() if skip_tail else frozenset()
    for operation in layer.operations:
        for position, call in enumerate(operation.calls):
            # `choice` counts the calls (matmul/2), so it is asked once for each, in order.
            kept = choice.keeps(call.operator)
            if (operation.name, position) not in tail and not call.once:
                yield (operation, call), kept


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
