"""The most that one rank holds for a micro-batch's backward at any moment: what is kept and not yet used, and what is rebuilt.

    the forward ends      all that is kept: activation_bytes
    a unit was replayed   what the layers up to it keep, and the whole of its own: later layers have let go of theirs by then;
                          so it is with a layer of which the results of some operators are kept

What waits in host memory comes back when its segment's backward begins, and that of the segment before with it. That too can be
the fullest moment, though nothing is rebuilt.

A long unit keeps little and rebuilds much: the second sum can be larger than the first. On top of both come gradients and
short-lived workspaces, which no plan changes much. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.memory.activations import EMBEDDING, ROTARY_TABLES, activation_terms, layer_terms
from megatron_lite.memory.layer_operators import kept_results
from megatron_lite.memory.layer_tensors import LayerTensors, Operation, Sizes, layer_tensors
from megatron_lite.recompute.plan import RecomputePlan, Segment


class Moment(NamedTuple):
    """first_layer, last_layer: what is being replayed, or has come back; None at the end of the forward."""

    first_layer: int | None
    last_layer: int | None
    held_bytes: int


def peak(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> Moment:
    """The moment of which the most is held."""
    return max(moments(model, plan, sizes), key=lambda moment: moment.held_bytes)


def moments(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> Iterator[Moment]:
    """The end of the forward, and the fullest moment of each segment's replay or return, in the order of the layers."""
    terms = activation_terms(model, plan, sizes)
    yield Moment(None, None, sum(term.num_bytes for term in terms if not term.on_host))
    kept, moved = [0] * plan.num_layers, [0] * plan.num_layers
    for term in terms:
        if term.layer is not None and term.tensor.name != ROTARY_TABLES:  # these every replay below holds itself
            (moved if term.on_host else kept)[term.layer] += term.num_bytes
    layer = layer_tensors(model, sizes)
    tables = sum(tensor.num_bytes for one in layer.operations for tensor in one.keeps if tensor.name == ROTARY_TABLES)
    returned = _returned_early(plan, moved)
    of_regions: dict[frozenset[str], int] = {}
    before = sum(term.num_bytes for term in terms if term.operation == EMBEDDING)
    gathered_ahead = 0  # beside the replay of a unit whose input is split, the input of the one before arrives
    for segment, early in zip(plan.segments, returned, strict=True):
        first, stop = segment.first_layer, segment.first_layer + segment.num_layers
        own = sum(kept[first:stop]) + sum(moved[first:stop])
        here = before + early
        if segment.unit:
            held = here + own + _rebuilt_unit(layer, segment, sizes)
            yield Moment(first, stop - 1, held + gathered_ahead if segment.split else held)
            gathered_ahead = layer.input.num_bytes if segment.split else gathered_ahead
        elif segment.ops:
            results = kept_results(model, segment.ops, sizes, skip_tail=plan.skip_tail)
            names = {tensor.name for result in results for tensor in result.tensors}
            yield Moment(first, stop - 1, here + own + _rebuilt_unit(layer, segment, sizes, names))
        else:
            if segment.regions not in of_regions:
                of_regions[segment.regions] = _fullest_replay(layer, segment.regions, sizes)
            fullest = of_regions[segment.regions]  # 0 for dropout at probability 0, a region with nothing in it
            if segment.on_host:
                fullest = max(fullest, own + tables)
            if fullest:
                yield Moment(first, stop - 1, here + fullest)
        before += sum(kept[first:stop])


def _returned_early(plan: RecomputePlan, moved: list[int]) -> list[int]:
    """By segment: what is on the device again, while its backward begins, of what earlier segments moved to host memory.

    The first read of a segment starts the copies back of the one before. The replay of a split unit reads the shard of the one
    before, whose gather it starts.
    """
    sizes = [sum(moved[segment.first_layer : segment.first_layer + segment.num_layers]) for segment in plan.segments]
    returned: set[int] = set()
    early = [0] * len(sizes)

    def earlier(number: int, *, split: bool = False) -> int | None:
        return next((one for one in reversed(range(number)) if (plan.segments[one].split if split else sizes[one])), None)

    for number in reversed(range(len(sizes))):
        before = earlier(number, split=True) if plan.segments[number].split else None
        for read in (number, before):
            if read is not None and sizes[read]:
                returned |= {one for one in (read, earlier(read)) if one is not None}
        early[number] = sum(sizes[one] for one in returned if one < number)
    return early


def _rebuilt_unit(layer: LayerTensors, segment: Segment, sizes: Sizes, kept: Set[str] = frozenset()) -> int:
    """What the replay of a unit adds to what the unit keeps: all of its layers, but for an input that is whole already.

    kept: what else is there already.
    """
    terms = layer_terms(layer, 0, frozenset(), sizes)
    tensors = {term.tensor.name: term.num_bytes for term in terms if term.tensor.name not in kept}
    tables = tensors.pop(ROTARY_TABLES, 0)
    return segment.num_layers * sum(tensors.values()) + tables - (0 if segment.split else layer.input.num_bytes)


def _fullest_replay(layer: LayerTensors, rebuilt: Set[str], sizes: Sizes) -> int:
    """The most that one layer with these regions holds right after it has rebuilt something; 0 if it never does."""
    return max((sum(held.values()) for held in _replays(layer, rebuilt, sizes)), default=0)


def _replays(layer: LayerTensors, rebuilt: Set[str], sizes: Sizes) -> Iterator[dict[str, int]]:
    """What is held at each operation whose backward rebuilds: all that the operations up to it keep, and the rebuilt tensors."""
    lender = {name: region for region in rebuilt for name in layer.regions[region].lent}
    for number, operation in enumerate(layer.operations):
        borrows = any(tensor.name in lender for tensor in operation.keeps)
        if not borrows and not (operation.region in rebuilt and operation.keeps):
            continue
        done = layer.operations[: number + 1]
        held = {term.tensor.name: term.num_bytes for term in layer_terms(_cut(layer, done), 0, rebuilt, sizes)}
        for position in _run_again(done, rebuilt):
            held |= _bytes_of(done[position])
            for region in {lender[tensor.name] for tensor in done[position].keeps if tensor.name in lender}:
                makers = [one for one in done[:position] if one.region == region]
                held |= _bytes_of(*makers[-1:])
        yield held


def _run_again(done: tuple[Operation, ...], rebuilt: Set[str]) -> range:
    """Positions: the last operation, and those before it that are in one region with it."""
    first = len(done) - 1
    while first > 0 and done[-1].region in rebuilt and done[first - 1].region == done[-1].region:
        first -= 1
    return range(first, len(done))


def _cut(layer: LayerTensors, done: tuple[Operation, ...]) -> LayerTensors:
    """The layer as far as `done`. A region that is entered several times has one input for each."""
    def times(name: str, operations: tuple[Operation, ...]) -> int:
        return sum(operation.region == name for operation in operations)

    return LayerTensors(done, {
        name: region._replace(inputs=region.inputs[: times(name, done)]) if times(name, done) < times(name, layer.operations)
        else region for name, region in layer.regions.items()})


def _bytes_of(*operations: Operation) -> dict[str, int]:
    return {tensor.name: tensor.num_bytes for operation in operations for tensor in operation.keeps}
