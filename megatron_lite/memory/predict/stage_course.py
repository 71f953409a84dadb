"""The forward and the backward of one micro-batch through one stage, under any recompute policy.

    forward     what is kept for backward is added up
    backward    from the last operation to the first: what is kept and rebuilt, and the operation's
                largest temporary (description/sizes.py)

A unit, or a layer with an `ops(...)` policy, rebuilds everything before its backward begins. A
region is rebuilt when the first operation reads it (layer_backward.py).

    @host     The originals of a segment live until the next such segment has run. The first read of
              a segment in backward brings it back, and the one before it.
    @split    A unit keeps 1/t of its input. Its replay gathers the input, and that of the split
              unit before it.

The course gives the activations alone (`kept_course`) and, with temporaries and gradients, the peak
of a step (step_peak.py). Standard library only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megatron_lite.description.model_ends import (
    embedding_operations,
    head_operations,
    waits_for_lookup,
)
from megatron_lite.description.operations import LayerDescription
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment

from .kept_tensors import HEAD, Term, activation_bytes, activation_terms, segment_terms
from .layer_backward import LayerBackward, end_name, layer_backward
from .walk import NOT_SHARDED, NOTHING, GatheredWeights, Moment, Passage

SLOT_ALIGNMENT = 512  # bytes, as in recompute/stores.py
CACHED = 1024


class KeptPoint(NamedTuple):
    """The bytes held for backward at one moment, for a memory timeline (measure/timeline.py).

    phase: "forward": the layer's forward has ended. "replay": the fullest moment of the backward of
        some layers, which rebuild tensors or get them back from the host. "backward": it has ended.
    first_layer, last_layer: the layers that have just run. Both are -1 when the whole forward has
        ended, with the output layer and the loss.
    """

    phase: str
    first_layer: int
    last_layer: int
    num_bytes: int


class StageCourse(NamedTuple):
    """The bytes that a micro-batch holds on a stage, moment by moment.

    The input of a stage without the embedding is held when the forward begins. The output of a
    stage without the head leaves with the forward's end, and its gradient is held when the backward
    begins. The gradient of the input leaves with the backward's end.

    replays: in the order of the backward.
    tables: the bytes of tables that layers share. They count in the replays alone, because the
        model holds them.
    on_host: the bytes that a micro-batch keeps in host memory. arena: those that the arena on the
        device has for it.
    staying: the bytes of weights that FSDP2 gathers once for several micro-batches.
    """

    forward: Passage
    backward: Passage
    replays: tuple[KeptPoint, ...]
    tables: int
    on_host: int
    arena: int
    staying: int


@lru_cache(CACHED)
def stage_course(
    plan: RecomputePlan, sizes: Sizes, weights: GatheredWeights = NOT_SHARDED
) -> StageCourse:
    """Returns the course of a micro-batch. weights: those that FSDP2 gathers."""
    layers, waits, hidden = describe_layers(sizes, plan.tiles), 0, sizes.residual
    units = weights.layers[: plan.num_layers] or (NOTHING,) * plan.num_layers
    # The gradient of a tied weight waits for that of the lookup.
    if waits_for_lookup(sizes):
        wide = sizes.accumulate_bytes if sizes.sums_gradients else sizes.element_bytes
        waits = sizes.padded_vocab_size // sizes.tp_size * sizes.model.hidden_size * wide
    alike = {id(one): one for one in layers}.values()
    tensors = {one for layer in alike for each in layer.operations for one in each.keeps}
    tables = sum(one.num_bytes for one in tensors if one.shared)
    first, last = embedding_operations(sizes), head_operations(sizes)
    embedding, head = (
        layer_backward(LayerDescription(one, ""), Segment(first_layer=0), (), sizes, is_end=True)
        for one in (first, last)
    )
    # Tensors of the micro-batch exist from the start to the end.
    given = sum(one.num_bytes for each in (*first, *last) for one in each.keeps if one.given)
    terms, arena = list[list[Term]](), 0  # by segment
    for segment in plan.segments:
        # An arena on the device is counted as a whole, and not here.
        in_arena = plan.contiguous and segment.unit and not segment.on_host
        own = [one for one in segment_terms(layers, plan, segment, sizes) if not one.tensor.shared]
        if in_arena:
            slots = (one.num_bytes for one in own if not one.tensor.stays)
            arena += sum(-(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for size in slots)
            own = [one for one in own if one.tensor.stays]
        terms.append(own)
    kept = [sum(sizes.allocated(one.num_bytes) for one in own) for own in terms]
    moved = [sum(one.num_bytes for one in own if one.on_host) for own in terms]
    forward, backward, replays = Passage(sizes), Passage(sizes), list[KeptPoint]()
    splits = [segment.split for segment in plan.segments]
    returned = _returned(splits, moved)
    gathered: set[int] = set()  # numbers of split units whose input is whole
    known: dict[tuple[object, ...], LayerBackward] = {}

    def run_forward() -> None:
        forward.kept = given
        forward.other -= weights.staying
        forward.gather(weights.root)
        if weights.staying:
            forward.other += weights.staying - weights.root.gathered
        if first:
            forward.other += hidden
            forward.gather(weights.embedding)
            forward.kept += embedding.kept
            forward.other -= weights.embedding.gathered
        running = 0  # bytes of weights that are freed when their layer has run
        waiting = 0  # bytes of originals of the last segment in host memory
        for segment, here, away in zip(plan.segments, kept, moved, strict=True):
            for at in segment.numbers:
                forward.other -= running
                forward.gather(units[at])
                running = weights.reshards * units[at].gathered
            forward.kept += here
            if segment.on_host:
                forward.kept -= away
                forward.other += away
                forward.look(Moment("forward of layers", segment.first_layer))
                forward.other -= waiting
                waiting = away
            own = (one for number in segment.numbers for one in layers[number].operations)
            if most := max(one.in_forward for one in own):
                forward.look(Moment("forward of experts", segment.first_layer, other=most))
        forward.other -= running
        forward.look(Moment("forward of layers", plan.num_layers - 1 if layers else None))
        forward.other -= waiting + hidden
        if last:
            forward.gather(weights.output, copies_out=not weights.tied)
            forward.kept += head.kept
            for one in last:
                # Weights that FSDP2 gathers for the forward are still there during the loss.
                sharded = weights is not NOT_SHARDED and one is last[-1]
                if one.gradients_in_forward or sharded:
                    forward.look(Moment(f"forward of {end_name(one)}", other=one.temporary))
        forward.other -= forward.buffer

    def run_backward() -> None:
        if weights.reshards and layers:
            backward.gather(units[-1], copies_out=False)
        if last:
            run_end(head)
            backward.other += hidden + waits
            backward.other -= weights.output.gathered
            backward.reduce(NOTHING if weights.tied else weights.output)
        for number, segment in reversed(list(enumerate(plan.segments))):
            if weights.reshards:  # the last layer is in the buffer, and copied out of it
                gathers = units[segment.first_layer : segment.numbers[-1]]
                backward.other += sum(one.gathered for one in gathers)
            run_segment(number, segment)
        if first:
            run_end(embedding)
        backward.other -= waits + hidden
        backward.reduce(weights.embedding)
        backward.other -= weights.staying or weights.root.gathered
        backward.reduce(weights.root)
        backward.other += weights.staying - backward.reduced
        backward.kept -= given

    def run_end(end: LayerBackward) -> None:
        backward.look(end.fullest)
        backward.kept -= end.kept
        backward.other += end.left

    def run_segment(number: int, segment: Segment) -> None:
        whole, back, copied = segment.is_whole, returned[number], 0
        at, residual, own = (
            segment.first_layer,
            layers[segment.first_layer].input.num_bytes,
            kept[number],
        )
        if whole:
            backward.kept, back = backward.kept + back, 0
        if segment.split:
            for one in {number, *_before(number, splits)} - gathered:
                gathered.add(one)
                backward.kept += residual
                backward.look(Moment("gather of an input", other=sizes.gloo_copy(residual)))
            own += residual
        if segment.unit and weights is not NOT_SHARDED and plan.skip_tail:
            # The replay's output is a view, which parallel/fsdp.py copies.
            copied = residual
        backward.other += copied
        parts = [part_of(number, segment, place, back) for place in range(segment.num_layers)]
        backward.rebuilt = sum(one.rebuilt for one in parts)
        held = []
        for place, part in reversed(list(enumerate(parts))):
            backward.rebuilt -= part.rebuilt
            if weights.reshards and place == 0 < at:  # which the layer before now takes
                backward.other += units[at - 1].gathered
            if part.replayed is not None:
                held.append(backward.kept + backward.rebuilt + part.replayed)
            backward.look(part.fullest._replace(layer=at + place))
            unit = units[at + place]
            backward.other += part.left - unit.gathered
            if not whole:
                backward.kept -= own - back
            backward.reduce(unit)
        if whole:
            backward.kept -= own
        backward.other -= copied
        if held:
            most = forward.kept + tables + max(held)
            replays.append(KeptPoint("replay", at, segment.numbers[-1], most))

    def part_of(number: int, segment: Segment, place: int, back: int) -> LayerBackward:
        """Returns the backward of a layer of a segment.

        back: the bytes that come back from the host when the first of them is read.
        """
        layer = layers[segment.first_layer + place]
        own = place == 0, place == segment.num_layers - 1, back
        key = id(layer), segment.unit, segment.rebuilt, segment.ops, segment.store, own
        if key not in known:
            known[key] = layer_backward(layer, segment, terms[number], sizes, *own)
        return known[key]

    run_forward()
    run_backward()
    on_host = sum(moved)
    return StageCourse(forward, backward, tuple(replays), tables, on_host, arena, weights.staying)


def _returned(splits: Sequence[bool], moved: Sequence[int]) -> list[int]:
    """Returns the bytes that come back from the host when a segment is read for the first time.

    splits: whether each segment is a split unit. moved: its bytes in host memory.
    The read of a segment also starts the copies of the one before it. The replay of a split unit
    reads the part of the split unit before it.
    """
    found, known = list[int](), set[int]()
    for number in reversed(range(len(moved))):
        back = set[int]()
        for one in (number, *(_before(number, splits) if splits[number] else ())):
            if moved[one]:
                back |= {one, *_before(one, moved)}
        found.append(sum(moved[one] for one in back - known))
        known |= back
    return found[::-1]


def _before(number: int, found: Sequence[int]) -> list[int]:
    """Returns the number of the last segment before this one of which the list has a value."""
    return [one for one in range(number - 1, -1, -1) if found[one]][:1]


def kept_course(plan: RecomputePlan, sizes: Sizes) -> Iterator[KeptPoint]:
    """Yields the points of one micro-batch on one stage, in the order of the step."""
    terms = [
        (-1 if one.layer is None else one.layer, one.num_bytes)
        for one in activation_terms(plan, sizes)
        if not (one.on_host or one.operation == HEAD)
    ]
    kept = [  # after the embedding and after each layer
        sum(size for layer, size in terms if layer < number)
        for number in range(plan.num_layers + 1)
    ]
    for layer in range(plan.num_layers):
        yield KeptPoint("forward", layer, layer, kept[layer + 1])
    yield KeptPoint("forward", -1, -1, activation_bytes(plan, sizes))
    replays = {one.first_layer: one for one in replays_of(plan, sizes)}
    for segment in reversed(plan.segments):
        first = segment.first_layer
        if first in replays:
            yield replays[first]
        yield KeptPoint("backward", first, segment.numbers[-1], kept[first])


def replays_of(plan: RecomputePlan, sizes: Sizes) -> tuple[KeptPoint, ...]:
    """Returns the replays of a plan. An input in an arena counts with its own bytes."""
    return stage_course(replace(plan, contiguous=False), sizes).replays
