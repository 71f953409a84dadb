"""The forward and the backward of one micro-batch through one stage, as passages.

Equal neighbouring segments are computed once and repeated, so a long stage costs no more than a
short one. Standard library only.

    @host     The originals of a segment live until the next such segment has run. Backward copies
              a segment and the one before it back.
    @split    A unit keeps 1/t of its input. Its replay gathers the input, and that of the split
              unit before it.
    arena     The input of a unit is copied into the arena, and freed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.operations import LayerDescription
from megatron_lite.description.sizes import Sizes, residual_bytes
from megatron_lite.description.temporaries import waits_for_lookup
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.predict.gathered_weights import GatheredWeights
from megatron_lite.memory.predict.kept_tensors import activation_terms, first_reader, layer_terms
from megatron_lite.memory.predict.layer_passages import (
    Passages,
    end_name,
    layer_passages,
    ops_results,
    replayed_passages,
)
from megatron_lite.memory.predict.passages import Passage, change, in_layer, joined
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment

NOTHING: frozenset[str] = frozenset()


def stage_passages(
    model: ModelConfig, plan: RecomputePlan, sizes: Sizes, gathers: GatheredWeights | None = None
) -> Passages:
    """Returns the forward and the backward of a micro-batch on one stage.

    The input of a stage without the embedding is held when the forward begins. The output of a
    stage without the head leaves with the forward's end, and its gradient is held when the backward
    begins. The gradient of the input leaves with the backward's end.

    gathers: the weights that FSDP2 gathers; None without it.
    """
    hidden = residual_bytes(model, sizes)
    layers = describe_layers(model, sizes, plan.num_layers)
    segments = list(_runs(model, plan, layers, sizes, gathers))
    # The tensors of the micro-batch that are kept exist from the start to the end.
    terms = activation_terms(model, plan, sizes)
    given = sum({one.tensor.name: one.num_bytes for one in terms if one.tensor.given}.values())
    # The gradient of a tied weight waits for that of the lookup.
    waits = 0
    if waits_for_lookup(model, sizes):
        wide = sizes.accumulate_bytes if sizes.sums_gradients else sizes.element_bytes
        waits = sizes.padded_vocab_size // sizes.tp_size * model.hidden_size * wide
    # Both lists are in the order of the forward. The end of this function reverses `backward`.
    forward, backward = [change(given, kept=given)], [change(-given, kept=-given)]
    if sizes.has_embedding:
        first = layer_passages(embedding_operations(model, sizes), NOTHING, sizes, is_end=True)
        looks_up = first.forward
        forward.append(looks_up if gathers is None else gathers.embedding_forward(looks_up))
        backward.append(joined(first.backward, change(-waits - hidden)))
    else:
        backward.append(change(-hidden))
    forward += [one.forward for one in segments]
    backward += [one.backward for one in segments]
    if sizes.has_head:
        operations = head_operations(model, sizes)
        last = layer_passages(operations, NOTHING, sizes, is_end=True)
        if gathers is not None:
            forward.append(gathers.begin_head())
            backward.append(gathers.end_head_backward())
        forward += [change(-hidden), last.forward]
        # Weights that FSDP2 gathers for the forward are still there when the loss is computed.
        of_gathers = operations[-1:] if gathers is not None else ()
        for one in [one for one in operations if one.gradients_in_forward] or of_gathers:
            forward += [
                change(one.temporary, f"forward of {end_name(one)}"),
                change(-one.temporary),
            ]
        backward.append(last.backward.then(change(hidden + waits)))
    else:
        forward.append(change(-hidden))
    if sizes.has_embedding:
        forward.insert(1, change(hidden))
    if gathers is not None:
        forward = [gathers.begin(), *forward, gathers.end()]
        backward = [gathers.end_backward(), *backward, gathers.begin_backward()]
    return Passages(joined(*forward), joined(*reversed(backward)))


class _Alike(NamedTuple):
    """Neighbouring segments that are treated alike. segment: the first of them."""

    segment: Segment
    layers: tuple[LayerDescription, ...]
    number: int


def _runs(
    model: ModelConfig,
    plan: RecomputePlan,
    layers: Sequence[LayerDescription],
    sizes: Sizes,
    gathers: GatheredWeights | None,
) -> Iterator[Passages]:
    """Yields the passages of the segments, those of alike neighbours as one."""
    groups = [
        _Alike(segment, own, len(list(others)) + 1)
        for _, group in itertools.groupby(plan.segments, key=lambda one: _treatment(one, layers))
        for segment, others in [(next(group), group)]
        for own in [tuple(layers[segment.first_layer : segment.first_layer + segment.num_layers])]
    ]
    on_host = [number for number, group in enumerate(groups) if group.segment.on_host]
    split = [number for number, group in enumerate(groups) if group.segment.split]
    moved_before = 0
    for number, group in enumerate(groups):
        one = _segment(plan, group, sizes)
        # Of the first segment, of those between, and of the last one.
        forward, backward = [one.forward] * 3, [one.backward] * 3
        if group.segment.split:
            num_bytes = group.layers[0].input.num_bytes
            copy = sizes.gloo_copy(num_bytes)
            whole = change(num_bytes + copy).then(change(-copy))
            # A replay gathers the input of the split unit before it (`ahead`), so its own input is
            # there already. Only the last split unit gathers its own.
            ahead = [number != split[0], True, True]
            own = [False, False, number == split[-1]]
            if group.number == 1:
                own[0] = own[2]
            for place in range(3):
                if ahead[place]:
                    backward[place] = whole.then(backward[place])
                if own[place]:
                    backward[place] = whole.then(backward[place])
        if group.segment.on_host:
            moved = _moved(group, sizes)
            befores = (moved_before, moved, moved)
            forward = [
                forward[place].then(change(-before, kept=-before))
                for place, before in enumerate(befores)
            ]
            # The copies of the segment before come back with those of this segment. Those of the
            # last segment come back when it reads one of them.
            back = list(befores)
            if number == on_host[-1]:
                back[2 if group.number > 1 else 0] += moved
            backward = [
                _segment(plan, group, sizes, returned=num_bytes).backward
                if group.segment.host_modules
                else change(num_bytes, kept=num_bytes).then(backward[place])
                for place, num_bytes in enumerate(back)
            ]
            moved_before = moved
        if gathers is not None:
            length = group.segment.num_layers
            befores_of = (gathers.before_layers if number == 0 else gathers.layer, gathers.layer)
            is_first = [number == 0, False, False]
            is_last = [False, False, number == len(groups) - 1]
            if group.number == 1:
                is_last[0] = is_last[2]
            for place in range(3):
                before = befores_of[min(place, 1)]
                if length > 1:
                    between = gathers.between(length, is_last=is_last[place])
                    backward[place] = _segment(plan, group, sizes, between=between).backward
                if group.segment.unit and plan.skip_tail:
                    # The replay's output is a view, which parallel/fsdp.py copies.
                    output = group.layers[0].input.num_bytes
                    backward[place] = joined(change(output), backward[place], change(-output))
                forward[place] = gathers.layer_forward(before, forward[place], length)
                backward[place] = gathers.layer_backward(
                    backward[place], length, is_last=is_last[place], is_first=is_first[place]
                )
        # A row is fullest in its first passage. In backward that is the one of the last segment.
        segments_before = (0, group.number - 2, group.number - 1)
        backward = [
            in_layer(one, group.segment.first_layer + group.segment.num_layers * earlier)
            for one, earlier in zip(backward, segments_before, strict=True)
        ]
        run = Passages(_row(forward, group.number), _row(backward, group.number, reverse=True))
        if on_host and number == len(groups) - 1:
            left = change(-moved_before, kept=-moved_before)
            run = run._replace(forward=run.forward.then(left))
        yield run


def _row(passages: Sequence[Passage], number: int, *, reverse: bool = False) -> Passage:
    """Returns `number` segments in a row.

    passages: of the first one, of one between, and of the last one.
    """
    first, between, last = passages
    parts = [first] if number == 1 else [first, between.times(number - 2), last]
    return joined(*(reversed(parts) if reverse else parts))


def _treatment(segment: Segment, layers: Sequence[LayerDescription]) -> tuple[object, ...]:
    own = layers[segment.first_layer : segment.first_layer + segment.num_layers]
    return (
        segment.unit,
        segment.num_layers,
        segment.regions,
        segment.ops,
        segment.store,
        *map(id, own),
    )


def _segment(
    plan: RecomputePlan,
    group: _Alike,
    sizes: Sizes,
    *,
    between: Sequence[Passage] = (),
    returned: int = 0,
) -> Passages:
    """Returns the passages of one segment.

    returned: the bytes that come back from host memory when a layer that keeps some parts there
        first reads one of them.
    """
    segment, layer = group.segment, group.layers[0]
    if segment.ops:
        results = ops_results(layer, segment.ops, skip_tail=plan.skip_tail)
        return replayed_passages(group.layers, sizes, results=results)
    if not segment.unit:
        names = {
            term.tensor.name
            for term in layer_terms(layer.operations, 0, NOTHING, sizes)
            if returned and segment.moves(term.module, stays=term.tensor.stays)
        }
        back = first_reader(layer.operations, names), returned
        return layer_passages(layer.operations, segment.regions, sizes, returned=back)
    one = replayed_passages(group.layers, sizes, between=between)
    if not (segment.split or plan.contiguous):
        return one
    # The whole input is freed when the unit has run. What is kept instead is a copy.
    whole = layer.input.num_bytes
    part = whole // sizes.tp_size if segment.split else whole
    on_device = 0 if plan.contiguous else part
    return Passages(
        one.forward.then(change(on_device - whole, kept=on_device - whole)),
        one.backward.then(change(whole * (not segment.split) - on_device, kept=whole - on_device)),
    )


def _moved(group: _Alike, sizes: Sizes) -> int:
    """Returns the bytes of a segment that wait in host memory."""
    if group.segment.unit:
        whole = group.layers[0].input.num_bytes
        return whole // sizes.tp_size if group.segment.split else whole
    return sum(
        term.num_bytes
        for term in layer_terms(group.layers[0].operations, 0, group.segment.regions, sizes)
        if group.segment.moves(term.module, stays=term.tensor.stays)
    )
