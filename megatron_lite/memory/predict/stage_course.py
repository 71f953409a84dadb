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
from megatron_lite.description.sizes import Shape, Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.predict.kept_tensors import (
    HEAD,
    activation_bytes,
    activation_terms,
    segment_terms,
)
from megatron_lite.memory.predict.layer_backward import LayerBackward, end_name, layer_backward
from megatron_lite.memory.predict.walk import (
    NOT_SHARDED,
    NOTHING,
    GatheredWeights,
    Moment,
    Passage,
    Walk,
)
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment

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
    course = _Course(plan, sizes, weights)
    passages = course.forward(), course.backward()
    kept = course.tables, sum(course.moved), course.arena
    return StageCourse(*passages, tuple(course.replays), *kept, weights.staying)


class _Course:
    """A walk over the segments of a stage, to the head and back."""

    def __init__(self, plan: RecomputePlan, sizes: Sizes, weights: GatheredWeights) -> None:
        self.plan, self.sizes, self.weights = plan, sizes, weights
        self.walk, self.replays = Walk(sizes), list[KeptPoint]()
        shape, self.waits = Shape(sizes), 0
        self.hidden = shape.residual
        # The gradient of a tied weight waits for that of the lookup.
        if waits_for_lookup(shape):
            wide = sizes.accumulate_bytes if sizes.sums_gradients else sizes.element_bytes
            self.waits = sizes.padded_vocab_size // sizes.tp_size * shape.model.hidden_size * wide
        self.layers = describe_layers(sizes, plan.tiles)
        alike = {id(one): one for one in self.layers}.values()
        tensors = {one for layer in alike for each in layer.operations for one in each.keeps}
        self.tables = sum(one.num_bytes for one in tensors if one.shared)
        self.first = embedding_operations(sizes)
        self.last = head_operations(sizes)
        self.embedding, self.head = (
            layer_backward(one, sizes, is_end=True) for one in (self.first, self.last)
        )
        # Tensors of the micro-batch exist from the start to the end.
        given = [one for each in (*self.first, *self.last) for one in each.keeps if one.given]
        self.given = sum(one.num_bytes for one in given)
        self.kept, self.moved = list[int](), list[int]()  # bytes of each segment
        self.arena = 0
        for segment in plan.segments:
            # An arena on the device is counted as a whole, and not here.
            in_arena = plan.contiguous and segment.unit and not segment.on_host
            own = [
                one
                for one in segment_terms(self.layers, plan, segment, sizes)
                if not one.tensor.shared
            ]
            if in_arena:
                slots = (one.num_bytes for one in own if not one.tensor.stays)
                self.arena += sum(-(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for size in slots)
                own = [one for one in own if one.tensor.stays]
            self.kept.append(sum(sizes.allocated(one.num_bytes) for one in own))
            self.moved.append(sum(one.num_bytes for one in own if one.on_host))
        self.splits = [segment.split for segment in plan.segments]
        self.returned: set[int] = set()  # numbers of segments that came back from the host
        self.gathered: set[int] = set()  # numbers of split units whose input is whole
        self.known: dict[tuple[object, ...], LayerBackward] = {}

    def forward(self) -> Passage:
        walk, weights = self.walk, self.weights
        walk.kept = self.given
        walk.gather(weights.root)
        if weights.several:
            walk.other -= weights.root.gathered
        if self.first:
            walk.other += self.hidden
            walk.gather(weights.embedding)
            walk.kept += self.embedding.kept
            walk.other -= weights.embedding.gathered
        waiting = 0  # bytes of originals of the last segment in host memory
        for segment, kept, moved in zip(self.plan.segments, self.kept, self.moved, strict=True):
            walk.gather(weights.layer)
            walk.kept += kept
            if segment.on_host:
                walk.kept -= moved
                walk.other += moved
                walk.look(Moment("forward of layers", segment.first_layer))
                walk.other -= waiting
                waiting = moved
            stay = 0 if weights.reshards else segment.num_layers
            walk.other += weights.layer.gathered * (stay - 1)
        walk.look(Moment("forward of layers", self.plan.num_layers - 1 if self.layers else None))
        walk.other -= waiting + self.hidden
        if self.last:
            walk.gather(weights.output)
            walk.kept += self.head.kept
            for one in self.last:
                # Weights that FSDP2 gathers for the forward are still there during the loss.
                sharded = weights is not NOT_SHARDED and one is self.last[-1]
                if one.gradients_in_forward or sharded:
                    walk.look(Moment(f"forward of {end_name(one)}", other=one.temporary))
        walk.other -= walk.buffer
        walk.look(Moment("end of the forward"))
        return walk.passage()

    def backward(self) -> Passage:
        walk, weights, layer = self.walk, self.weights, self.weights.layer
        if weights.reshards and self.layers:
            walk.gather(layer, copies_out=False)
        if self.last:
            self._end(self.head)
            walk.other += self.hidden + self.waits
            walk.other -= weights.output.gathered
            walk.reduce(NOTHING if weights.tied else weights.output)
        for number in reversed(range(len(self.plan.segments))):
            if weights.reshards:
                # The layers are copied out of the buffer, which the layer before then takes.
                walk.other += layer.gathered * (
                    self.plan.segments[number].num_layers - (not number)
                )
            self._segment(number)
        if self.first:
            self._end(self.embedding)
        walk.other -= self.waits + self.hidden
        walk.reduce(weights.embedding)
        if not weights.several:
            walk.other -= weights.root.gathered
        walk.reduce(weights.root)
        walk.other -= walk.reduced
        walk.kept -= self.given
        return walk.passage()

    def _end(self, backward: LayerBackward) -> None:
        """Runs the backward of the embedding or of the head."""
        self.walk.look(backward.fullest)
        self.walk.kept -= backward.kept
        self.walk.other += backward.left

    def _before(self, number: int, found: Sequence[int | bool]) -> list[int]:
        """Returns the number of the last segment before this one of which the list has a value."""
        return [one for one in range(number - 1, -1, -1) if found[one]][:1]

    def _return(self, number: int) -> int:
        """Returns the bytes that come back from the host when a segment is read for the first time.

        The read of a segment also starts the copies of the one before it. The replay of a split
        unit reads the part of the split unit before it.
        """
        back, splits = set(), self.splits
        for one in (number, *(self._before(number, splits) if splits[number] else ())):
            if self.moved[one]:
                back |= {one, *self._before(one, self.moved)}
        found = sum(self.moved[one] for one in back - self.returned)
        self.returned |= back
        return found

    def _segment(self, number: int) -> None:
        """Runs the backward of a segment."""
        segment, walk, copied = self.plan.segments[number], self.walk, 0
        whole, returned = segment.unit or bool(segment.ops), self._return(number)
        first, residual = segment.first_layer, self.layers[segment.first_layer].input.num_bytes
        kept = self.kept[number]
        if whole:
            walk.kept, returned = walk.kept + returned, 0
        if segment.split:
            for one in {number, *self._before(number, self.splits)} - self.gathered:
                self.gathered.add(one)
                walk.kept += residual
                walk.look(Moment("gather of an input", other=self.sizes.gloo_copy(residual)))
            kept += residual
        if segment.unit and self.weights is not NOT_SHARDED and self.plan.skip_tail:
            # The replay's output is a view, which parallel/fsdp.py copies.
            copied = residual
        walk.other += copied
        parts = [self._part(segment, place, returned) for place in range(segment.num_layers)]
        walk.rebuilt = sum(one.rebuilt for one in parts)
        held = []
        for place, part in reversed(list(enumerate(parts))):
            walk.rebuilt -= part.rebuilt
            if part.replayed is not None:
                held.append(walk.kept + walk.rebuilt + part.replayed + self.tables)
            walk.look(part.fullest._replace(layer=first + place))
            walk.other += part.left - self.weights.layer.gathered
            if not whole:
                walk.kept -= kept - returned
            walk.reduce(self.weights.layer)
        if whole:
            walk.kept -= kept
        walk.other -= copied
        if held:
            self.replays.append(KeptPoint("replay", first, segment.numbers[-1], max(held)))

    def _part(self, segment: Segment, place: int, returned: int) -> LayerBackward:
        """Returns the backward of a layer of a segment.

        returned: the bytes that come back from the host when the first of them is read.
        """
        layer = self.layers[segment.first_layer + place]
        is_last = place == segment.num_layers - 1
        treated = segment.unit, segment.rebuilt, segment.ops, segment.store
        key = (id(layer), treated, place == 0, is_last, returned)
        if key in self.known:
            return self.known[key]
        terms = tuple(segment_terms(self.layers, self.plan, segment, self.sizes))
        reader, replays_but, beside = -1, None, (-1, 0)
        if segment.unit or segment.ops:
            names = (layer.input.name, *(one.tensor.name for one in terms))
            replays_but = frozenset(names if place == 0 else ())
            if segment.unit and is_last:
                # The caller of a replay holds the gradient of the output, so the gradient of the
                # MLP's input cannot be added to it in place.
                absorbs = [one.name for one in layer.operations].index(layer.absorbs)
                beside = absorbs, layer.input.num_bytes
        elif segment.on_host:
            moved = {one.tensor.name for one in terms if segment.host_modules and one.on_host}
            reader = max(
                (
                    number
                    for number, one in enumerate(layer.operations)
                    if any(tensor.name in moved for tensor in one.keeps)
                ),
                default=len(layer.operations) - 1,
            )
        self.known[key] = layer_backward(
            layer.operations,
            self.sizes,
            regions=segment.rebuilt,
            replays_but=replays_but,
            returned=(reader, returned),
            beside=beside,
        )
        return self.known[key]


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
