"""The forward and the backward of one micro-batch through one stage, under any recompute policy.

    forward     what is kept for backward is added up
    backward    from the last operation to the first: what is kept and rebuilt, and the operation's
                largest temporary (description/shape.py)

A unit, or a layer with an `ops(...)` policy, rebuilds everything before its backward begins. A
region is rebuilt when the first operation reads it (held_tensors.py).

    @host     The originals of a segment live until the next such segment has run. The first read of
              a segment in backward brings it back, and the one before it.
    @split    A unit keeps 1/t of its input. Its replay gathers the input, and that of the split
              unit before it.

The course gives the activations alone (peak.py) and, with temporaries and gradients, the peak of a
step (step_peak.py). Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.model_ends import (
    embedding_operations,
    head_operations,
    waits_for_lookup,
)
from megatron_lite.description.operations import (
    KeptTensor,
    LayerDescription,
    Operation,
    document_starts,
)
from megatron_lite.description.shape import Shape
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.predict.gathered_weights import NOT_SHARDED, GatheredWeights
from megatron_lite.memory.predict.held_tensors import held_in_backward
from megatron_lite.memory.predict.kept_tensors import first_reader, layer_terms
from megatron_lite.memory.predict.passages import Moment, Passage, Walk
from megatron_lite.memory.predict.replays import kept_calls
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment

NOTHING: frozenset[str] = frozenset()


class Replay(NamedTuple):
    """The most activations that are held while some layers are rebuilt or come back from the host.

    The layers are those from `first_layer` to `last_layer`.
    """

    first_layer: int
    last_layer: int
    held_bytes: int


class StageCourse(NamedTuple):
    """The bytes that a micro-batch holds on a stage, moment by moment.

    The input of a stage without the embedding is held when the forward begins. The output of a
    stage without the head leaves with the forward's end, and its gradient is held when the backward
    begins. The gradient of the input leaves with the backward's end.

    kept: the bytes kept on the device after the embedding and after each layer's forward.
    replays: in the order of the backward.
    """

    forward: Passage
    backward: Passage
    kept: tuple[int, ...]
    replays: tuple[Replay, ...]


class _Backward(NamedTuple):
    """The backward of the operations of one layer, of the embedding or of the head.

    begins: what is held of the layer when it begins. fullest: what is held of it at its fullest
        moment. `other` in both is the allocator's rounding.
    replayed: the most activations right after something was rebuilt, or came back from the host.
    left: the gradients of parameters that live on.
    """

    begins: Moment
    fullest: Moment
    replayed: int
    left: int


def stage_course(
    model: ModelConfig, plan: RecomputePlan, sizes: Sizes, gathers: GatheredWeights = NOT_SHARDED
) -> StageCourse:
    """Returns the course of a micro-batch. gathers: the weights that FSDP2 gathers."""
    return _Course(model, plan, sizes, gathers).run()


class _Course:
    """A walk over the segments of a stage, to the head and back."""

    def __init__(
        self, model: ModelConfig, plan: RecomputePlan, sizes: Sizes, gathers: GatheredWeights
    ) -> None:
        self.plan, self.sizes, self.gathers = plan, sizes, gathers
        self.layers = describe_layers(model, sizes, plan.num_layers)
        self.first = embedding_operations(model, sizes) if sizes.has_embedding else ()
        self.last = head_operations(model, sizes) if sizes.has_head else ()
        self.hidden, self.waits = Shape(model, sizes).residual, 0
        # The gradient of a tied weight waits for that of the lookup.
        if waits_for_lookup(Shape(model, sizes)):
            wide = sizes.accumulate_bytes if sizes.sums_gradients else sizes.element_bytes
            self.waits = sizes.padded_vocab_size // sizes.tp_size * model.hidden_size * wide
        self.walk = Walk()
        # By the name of a tensor that layers share: the first layer that keeps it, and its bytes. A
        # tensor of the micro-batch has the number -1, because it is held until the end.
        self.tables: dict[str, tuple[int, int]] = {}
        self.moved = [self._moved(one) for one in plan.segments]
        self.returned: set[int] = set()  # numbers of segments that came back from the host
        self.gathered: set[int] = set()  # numbers of split units whose input is whole
        self.known: dict[tuple[object, ...], _Backward] = {}

    def run(self) -> StageCourse:
        walk, sizes, gathers = self.walk, self.sizes, self.gathers
        # Tensors of the micro-batch exist from the start to the end.
        starts = document_starts(sizes).num_bytes if sizes.resets_attention else 0
        given, masks = _given(self.first), _given(self.last)
        walk.kept, walk.other = given, masks + starts
        gathers.begin(walk)
        if self.first:
            walk.other += self.hidden
            gathers.begin_embedding(walk)
            embedding = _backward(self.first, sizes, is_end=True)
            self._hold(embedding.begins)
            gathers.end_embedding(walk)
        kept = [walk.kept]
        waiting = 0  # bytes of originals of the last segment in host memory
        for number, segment in enumerate(self.plan.segments):
            gathers.begin_layers(walk, is_first=number == 0)
            begins = self._begins(segment)
            self._hold(begins)
            if segment.on_host:
                walk.kept -= self.moved[number]
                walk.other += self.moved[number]
                walk.look("forward of layers", segment.first_layer)
                walk.other -= waiting
                waiting = self.moved[number]
            gathers.end_layers(walk, segment.num_layers)
            kept += [walk.kept + self._table_bytes()] * segment.num_layers
        walk.look("forward of layers", self.plan.num_layers - 1)
        walk.other -= waiting + self.hidden
        if self.last:
            gathers.begin_head(walk)
            head = _backward(self.last, sizes, is_end=True)
            self._hold(head.begins)
            walk.kept += masks
            walk.other -= masks
            # Weights that FSDP2 gathers for the forward are still there during the loss.
            for one in self.last:
                if one.gradients_in_forward or (
                    gathers is not NOT_SHARDED and one is self.last[-1]
                ):
                    walk.look(f"forward of {_end_name(one)}", other=one.temporary)
        gathers.end(walk)
        walk.look("end of the forward")
        forward = walk.passage()
        gathers.begin_backward(walk)
        if self.last:
            self._free(head)
            walk.kept -= masks
            walk.other += masks + self.hidden + self.waits
            gathers.end_head_backward(walk)
        replays = [self._replay(number) for number in reversed(range(len(self.plan.segments)))]
        if self.first:
            self._free(embedding)
        walk.other -= self.waits + self.hidden
        gathers.end_backward(walk)
        walk.kept -= given
        walk.other -= masks + starts
        return StageCourse(
            forward, walk.passage(), tuple(kept), tuple(one for one in replays if one.held_bytes)
        )

    def _hold(self, held: Moment, sign: int = 1) -> None:
        self.walk.kept += sign * held.kept
        self.walk.other += sign * held.other

    def _free(self, backward: _Backward) -> None:
        """Runs the backward of the embedding or of the head."""
        self._look(backward, None)
        self._hold(backward.begins, -1)
        self.walk.other += backward.left

    def _look(self, backward: _Backward, layer: int | None) -> None:
        begins, fullest = backward.begins, backward.fullest
        self.walk.look(
            fullest.where,
            layer,
            kept=fullest.kept - begins.kept,
            rebuilt=fullest.rebuilt,
            other=fullest.other - begins.other,
        )

    def _table_bytes(self, before: int | None = None) -> int:
        """Returns the bytes of tables that layers keep, or layers before this number."""
        return sum(
            num_bytes
            for first, num_bytes in self.tables.values()
            if before is None or first < before
        )

    def _own(self, segment: Segment) -> tuple[LayerDescription, ...]:
        return self.layers[segment.first_layer : segment.first_layer + segment.num_layers]

    def _begins(self, segment: Segment) -> Moment:
        """Returns what a segment keeps, and notes the tables that it is the first to keep."""
        if segment.unit or segment.ops:
            shared = [document_starts(self.sizes)] if self.sizes.resets_attention else []
            begins = _moment(self._kept_by_unit(segment), {}, NOTHING, self.sizes)
        else:
            operations = self.layers[segment.first_layer].operations
            terms = layer_terms(operations, 0, segment.regions, self.sizes)
            shared = [term.tensor for term in terms if term.tensor.shared]
            begins = self._layer_backward(segment).begins
        for one in shared:
            first = -1 if one.given else segment.first_layer
            self.tables.setdefault(one.name, (first, one.num_bytes))
        return begins

    def _kept_by_unit(self, segment: Segment) -> dict[str, int]:
        """Returns the names and bytes of what a unit, or a layer with `ops(...)`, keeps.

        An arena on the device is counted as a whole, and not here.
        """
        layer = self.layers[segment.first_layer]
        kept = {"generators": self.sizes.rng_state_bytes}
        if not self.plan.contiguous or segment.on_host:
            parts = self.sizes.tp_size if segment.split else 1
            kept["part" if segment.split else layer.input.name] = layer.input.num_bytes // parts
        return kept | self._results(segment)

    def _results(self, segment: Segment) -> dict[str, int]:
        """Returns the names and bytes of the results that an `ops(...)` policy keeps."""
        if not segment.ops:
            return {}
        layer = self.layers[segment.first_layer]
        calls = kept_calls(layer, segment.ops, skip_tail=self.plan.skip_tail)
        return {one.name: one.num_bytes for _, call in calls for one in call.returns}

    def _moved(self, segment: Segment) -> int:
        """Returns the bytes of a segment that wait in host memory."""
        if not segment.on_host:
            return 0
        if segment.unit or segment.ops:
            return sum(self._kept_by_unit(segment).values()) - self.sizes.rng_state_bytes
        operations = self.layers[segment.first_layer].operations
        return sum(
            term.num_bytes
            for term in layer_terms(operations, 0, segment.regions, self.sizes)
            if segment.moves(term.module, stays=term.tensor.stays)
        )

    def _layer_backward(self, segment: Segment, returned: int = 0) -> _Backward:
        """Returns the backward of a layer that is no unit.

        returned: the bytes that come back from the host when the first of them is read.
        """
        layer = self.layers[segment.first_layer]
        earlier = frozenset(
            name for name, (first, _) in self.tables.items() if first < segment.first_layer
        )
        key = (id(layer), segment.regions, segment.store, earlier, returned)
        if key not in self.known:
            reader = -1
            if segment.on_host:
                names = {
                    term.tensor.name
                    for term in layer_terms(layer.operations, 0, segment.regions, self.sizes)
                    if segment.host_modules and segment.moves(term.module, stays=term.tensor.stays)
                }
                reader = first_reader(layer.operations, names)
            self.known[key] = _backward(
                layer.operations,
                self.sizes,
                regions=segment.regions,
                earlier=earlier,
                returned=(reader, returned),
            )
        return self.known[key]

    def _unit_backward(self, segment: Segment, number: int) -> _Backward:
        """Returns the backward of a layer of a unit, or of one with `ops(...)`."""
        layer = self._own(segment)[number]
        is_last = number == segment.num_layers - 1 and not segment.ops
        key = (id(layer), number == 0, is_last, segment.ops)
        if key not in self.known:
            kept = self._results(segment).keys() | ({layer.input.name} if number == 0 else set())
            names = [one.name for one in layer.operations]
            # The caller of a replay holds the gradient of the output, so the gradient of the MLP's
            # input cannot be added to it in place.
            apart = (names.index(layer.absorbs), layer.input.num_bytes) if is_last else (-1, 0)
            self.known[key] = _backward(
                layer.operations, self.sizes, replays_but=kept, beside=apart
            )
        return self.known[key]

    def _replay(self, number: int) -> Replay:
        """Runs the backward of a segment."""
        segment, walk = self.plan.segments[number], self.walk
        first, last = segment.first_layer, segment.first_layer + segment.num_layers - 1
        run = self._run_unit if segment.unit or segment.ops else self._run_layer
        self.gathers.begin_layers_backward(walk, segment.num_layers, is_first=number == 0)
        return Replay(first, last, run(segment, number))

    def _return(self, number: int) -> int:
        """Returns the bytes that come back from the host when a segment is read for the first time.

        The read of a segment also starts the copies of the one before it. The replay of a split
        unit reads the part of the split unit before it.
        """
        reads = [number]
        if self.plan.segments[number].split:
            reads += [one for one in self._before(number) if self.plan.segments[one].split][:1]
        back: set[int] = set()
        for one in reads:
            if self.moved[one]:
                back |= {one, *[other for other in self._before(one) if self.moved[other]][:1]}
        found = sum(self.moved[one] for one in back - self.returned)
        self.returned |= back
        return found

    def _before(self, number: int) -> range:
        return range(number - 1, -1, -1)

    def _run_layer(self, segment: Segment, number: int) -> int:
        walk, returned = self.walk, self._return(number)
        backward = self._layer_backward(segment, returned)
        self._look(backward, segment.first_layer)
        begins = backward.begins
        held = walk.kept - begins.kept + self._table_bytes(segment.first_layer) + backward.replayed
        walk.kept += returned - begins.kept
        walk.other += backward.left - begins.other
        self.gathers.end_layer_backward(walk)
        return held if backward.replayed else 0

    def _run_unit(self, segment: Segment, number: int) -> int:
        walk, layers, copied = self.walk, self._own(segment), 0
        walk.kept += self._return(number)
        if segment.split:
            whole = layers[0].input.num_bytes
            before = [one for one in self._before(number) if self.plan.segments[one].split][:1]
            for one in (number, *before):
                if one not in self.gathered:
                    self.gathered.add(one)
                    walk.kept += whole
                    walk.look("gather of an input", other=self.sizes.gloo_copy(whole))
        if segment.unit and self.gathers is not NOT_SHARDED and self.plan.skip_tail:
            # The replay's output is a view, which parallel/fsdp.py copies.
            copied = layers[0].input.num_bytes
        walk.other += copied
        parts = [self._unit_backward(segment, place) for place in range(len(layers))]
        walk.rebuilt = sum(one.begins.rebuilt for one in parts)
        held = walk.kept + self._table_bytes(segment.first_layer) + walk.rebuilt
        held += sum(
            num_bytes
            for name, num_bytes in {
                k: v for layer in layers for k, v in layer.tables().items()
            }.items()
            if name not in self.tables or self.tables[name][0] >= segment.first_layer
        )
        walk.other += sum(one.begins.other for one in parts)
        for place, part in reversed(list(enumerate(parts))):
            walk.rebuilt -= part.begins.rebuilt
            self._look(part, segment.first_layer + place)
            walk.other += part.left - part.begins.other
            self.gathers.end_layer_backward(walk)
        walk.other -= copied
        self._hold(self._begins(segment), -1)
        walk.kept -= layers[0].input.num_bytes if segment.split else 0
        return held


def _backward(
    operations: Sequence[Operation],
    sizes: Sizes,
    *,
    regions: Set[str] = NOTHING,
    replays_but: Set[str] | None = None,
    earlier: Set[str] = NOTHING,
    returned: tuple[int, int] = (-1, 0),
    beside: tuple[int, int] = (-1, 0),
    is_end: bool = False,
) -> _Backward:
    """Returns the backward of the operations of a layer, of the embedding or of the head.

    regions: the names of the regions that are rebuilt.
    replays_but: of a layer that is replayed as a whole, the names of what is kept.
    earlier: the names of the tables that earlier layers keep.
    returned: the number of an operation, and the bytes that come back from the host before it.
    beside: the number of an operation, and further bytes that are held from its backward on.
    """
    elsewhere = frozenset(
        tensor.name for tensor in _tensors(operations, sizes) if tensor.shared or tensor.given
    )
    given = frozenset(tensor.name for tensor in _tensors(operations, sizes) if tensor.given)
    begins = fullest = Moment()
    replayed = left = 0
    course = list(enumerate(held_in_backward(operations, regions, sizes)))
    for number, held in reversed(course):
        operation, kept, rebuilt = operations[number], held.kept, held.rebuilt
        if replays_but is not None:
            kept, rebuilt = {}, {k: v for k, v in kept.items() if k not in replays_but}
        found = _moment(kept, rebuilt, elsewhere, sizes)
        if number == len(operations) - 1:
            begins = found._replace(rebuilt=found.rebuilt if replays_but is not None else 0)
        back = returned[1] if number <= returned[0] else 0
        if held.rebuilds or number == returned[0]:
            tables = {k: v for k, v in (kept | rebuilt).items() if k in elsewhere - given - earlier}
            replayed = max(replayed, found.kept + found.rebuilt + sum(tables.values()) + back)
        extra = left + (0 if operation.gradients_in_forward else operation.temporary)
        extra += beside[1] if number <= beside[0] else 0
        name = _end_name(operation) if is_end else operation.name
        found = found._replace(
            where=f"backward of {name}", kept=found.kept + back, other=found.other + extra
        )
        if not fullest.where or found.num_bytes > fullest.num_bytes:
            fullest = found
        # Under FSDP2 gradients live until their unit is reduced.
        if not sizes.sums_gradients:
            elements = sum(parameter.num_elements for parameter in operation.parameters)
            left += elements * sizes.element_bytes
    return _Backward(begins, fullest, replayed, left)


def _moment(
    kept: Mapping[str, int], rebuilt: Mapping[str, int], elsewhere: Set[str], sizes: Sizes
) -> Moment:
    """Returns the sums of tensors, without those that are counted elsewhere."""
    own, again = (
        [size for name, size in tensors.items() if name not in elsewhere]
        for tensors in (kept, rebuilt)
    )
    rounding = sum(sizes.allocated(size) - size for size in (*own, *again))
    return Moment(kept=sum(own), rebuilt=sum(again), other=rounding)


def _tensors(operations: Iterable[Operation], sizes: Sizes) -> list[KeptTensor]:
    return [
        tensor
        for one in operations
        for tensor in (*one.keeps, *(t for entry in one.enters for t in entry.kept(sizes)))
    ]


def _given(operations: Iterable[Operation]) -> int:
    return sum(tensor.num_bytes for one in operations for tensor in one.keeps if tensor.given)


def _end_name(operation: Operation) -> str:
    return f"the {operation.name.replace('_', ' ')}"
