"""The peak: the most bytes that one rank holds for a micro-batch's backward at any moment.

It holds the tensors that are kept and not yet used, and those that a replay has rebuilt.

    the forward ends      all that is kept: activation_bytes
    a unit was replayed   what the layers before it keep, and all that the unit's layers save. Later
                          layers have freed their tensors by then. A layer with an `ops(...)`
                          policy has a moment of the same kind.

Tensors in host memory come back when their segment's backward begins, and those of the segment
before it come back with them. That too can be the fullest moment, although nothing is rebuilt.

A long unit keeps little and rebuilds much, so the second sum can be larger than the first.
Gradients and short-lived workspaces come on top of both, and no plan changes them much. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.operations import LayerDescription
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.predict.held_tensors import held_in_backward
from megatron_lite.memory.predict.kept_tensors import (
    EMBEDDING,
    Term,
    activation_terms,
    first_reader,
    layer_terms,
)
from megatron_lite.memory.predict.replays import kept_calls
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment


class PeakMoment(NamedTuple):
    """A moment and the bytes held at it.

    first_layer, last_layer: the layers that were replayed, or whose tensors have come back from
        host memory; None at the end of the forward.
    """

    first_layer: int | None
    last_layer: int | None
    held_bytes: int


def peak(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> PeakMoment:
    """Returns the moment at which the rank holds the most bytes."""
    return max(moments(model, plan, sizes), key=lambda moment: moment.held_bytes)


def moments(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> Iterator[PeakMoment]:
    """Yields the moments that can be the peak, in the order of the layers.

    They are the end of the forward, and the fullest moment of each segment's replay or return from
    host memory.
    """
    terms = activation_terms(model, plan, sizes)
    yield PeakMoment(None, None, sum(term.num_bytes for term in terms if not term.on_host))
    # By layer: bytes kept on the device, and bytes moved to host memory. A table that layers share
    # counts in the first layer that keeps it.
    kept, moved = [0] * plan.num_layers, [0] * plan.num_layers
    for term in terms:
        if term.layer is not None and not term.tensor.given:
            (moved if term.on_host else kept)[term.layer] += term.num_bytes
    # A tensor of the micro-batch is held until the first layer's backward has ended.
    tables_from = {
        term.tensor.name: -1 if term.tensor.given else term.layer
        for term in terms
        if term.tensor.shared and term.layer is not None
    }
    layers = describe_layers(model, sizes, plan.num_layers)
    returned = _returned_early(plan, moved)
    of_regions: dict[tuple[int, frozenset[str], frozenset[str]], int] = {}
    # Backward runs from the last segment to the first. When it reaches a segment, the later ones
    # have freed their tensors: only the segment's own bytes and `before`, those of the embedding
    # and of all earlier segments, are held.
    before = sum(
        term.num_bytes
        for term in terms
        if term.operation == EMBEDDING or (term.tensor.given and term.tensor.shared)
    )
    # The replay of a split unit gathers the input of the split unit before it at the same time.
    gathered_ahead = 0
    for segment, early in zip(plan.segments, returned, strict=True):
        first, stop = segment.first_layer, segment.first_layer + segment.num_layers
        own = sum(kept[first:stop]) + sum(moved[first:stop])
        here, layer = before + early, layers[first]
        tables = frozenset(
            name for name, layer_number in tables_from.items() if layer_number < first
        )
        if segment.unit:
            held = here + own + _rebuilt_unit(layers[first:stop], segment, sizes, tables)
            yield PeakMoment(first, stop - 1, held + gathered_ahead if segment.split else held)
            gathered_ahead = layer.input.num_bytes if segment.split else gathered_ahead
        elif segment.ops:
            calls = kept_calls(layer, segment.ops, skip_tail=plan.skip_tail)
            names = tables | {tensor.name for _, call in calls for tensor in call.returns}
            yield PeakMoment(
                first, stop - 1, here + own + _rebuilt_unit((layer,), segment, sizes, names)
            )
        elif segment.host_modules:
            own_terms = [one for one in terms if one.layer == first and not one.tensor.given]
            yield PeakMoment(first, stop - 1, here + _held_at_first_read(layer, own_terms))
        else:
            # layers that are alike share one description
            key = (id(layer), segment.regions, tables)
            if key not in of_regions:
                of_regions[key] = _fullest_replay(layer, segment.regions, sizes, tables)
            fullest = of_regions[key]  # 0 for an empty region: dropout at probability 0
            if segment.on_host:
                fullest = max(fullest, own)
            if fullest:
                yield PeakMoment(first, stop - 1, here + fullest)
        before += sum(kept[first:stop])


def _held_at_first_read(layer: LayerDescription, terms: list[Term]) -> int:
    """Returns the bytes of a layer when its backward first reads a tensor from host memory.

    All moved tensors are back then. The operations behind the first reader have run their backward
    and have freed what they alone kept.
    terms: the tensors that the layer keeps.
    """
    names = {term.tensor.name for term in terms if term.on_host}
    if not names:
        return 0
    places = {one.name: place for place, one in reversed(list(enumerate(layer.operations)))}
    reader = first_reader(layer.operations, names)
    return sum(
        term.num_bytes
        for term in terms
        if term.on_host or term.tensor.shared or places[term.operation] <= reader
    )


def _returned_early(plan: RecomputePlan, moved: list[int]) -> list[int]:
    """Returns, for each segment, the bytes of earlier segments that are back on the device already.

    The time is the start of the segment's backward. The first read of a segment also starts the
    copies of the last segment before it that moved something. The replay of a split unit reads the
    shard of the split unit before it, because it starts the gather of that shard.
    moved: by layer, the bytes moved to host memory.
    """
    sizes = [
        sum(moved[segment.first_layer : segment.first_layer + segment.num_layers])
        for segment in plan.segments
    ]
    returned: set[int] = set()
    early = [0] * len(sizes)

    def earlier(number: int, *, split: bool = False) -> int | None:
        return next(
            (
                one
                for one in reversed(range(number))
                if (plan.segments[one].split if split else sizes[one])
            ),
            None,
        )

    for number in reversed(range(len(sizes))):
        before = earlier(number, split=True) if plan.segments[number].split else None
        for read in (number, before):
            if read is not None and sizes[read]:
                returned |= {one for one in (read, earlier(read)) if one is not None}
        # A segment that came back is freed after its own backward, so later ones do not count.
        early[number] = sum(sizes[one] for one in returned if one < number)
    return early


def _rebuilt_unit(
    layers: Sequence[LayerDescription], segment: Segment, sizes: Sizes, kept: Set[str]
) -> int:
    """Returns the bytes that the replay of a unit adds to the unit's kept bytes.

    They are all that its layers save without recomputation, except an input that is kept whole.
    kept: the names of further tensors that are held already, such as tables of earlier layers.
    """
    tables: dict[str, int] = {}
    rebuilt = 0
    for layer in layers:
        tables |= {
            name: num_bytes for name, num_bytes in layer.tables().items() if name not in kept
        }
        rebuilt += sum(
            term.num_bytes
            for term in layer_terms(layer.operations, 0, frozenset(), sizes)
            if term.tensor.name not in kept and not term.tensor.shared
        )
    return rebuilt + sum(tables.values()) - (0 if segment.split else layers[0].input.num_bytes)


def _fullest_replay(
    layer: LayerDescription, rebuilt: Set[str], sizes: Sizes, tables: Set[str]
) -> int:
    """Returns the most bytes that one layer with these regions holds right after a rebuild.

    0 if the layer rebuilds nothing. tables: the names of tensors that earlier layers hold; they do
    not count.
    """
    return max(
        (
            sum(size for name, size in (held.kept | held.rebuilt).items() if name not in tables)
            for held in held_in_backward(layer.operations, rebuilt, sizes)
            if held.rebuilds
        ),
        default=0,
    )
