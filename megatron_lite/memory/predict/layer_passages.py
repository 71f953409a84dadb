"""The passages of a segment of layers: its forward and its backward, under any recompute policy.

    forward     what is kept for backward
    backward    for each operation, from the last to the first: what is kept and rebuilt, and the
                operation's largest temporary (description/temporaries.py)

A unit, or a layer with an `ops(...)` policy, rebuilds everything before its backward begins. A
region is rebuilt when the first operation reads it (held_tensors.py). Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple

from megatron_lite.description.operations import LayerDescription, Operation
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.held_tensors import held_in_backward
from megatron_lite.memory.predict.passages import Moment, Passage, change, joined
from megatron_lite.memory.predict.replays import kept_calls

NOTHING: Mapping[str, int] = MappingProxyType({})


class Passages(NamedTuple):
    """The forward and the backward of a part of a stage.

    When the forward begins, the input is held; when it ends, the output is held too. When the
    backward begins, the gradient of the output is held; when it ends, only that of the input is.
    """

    forward: Passage
    backward: Passage


def layer_passages(
    operations: Sequence[Operation],
    regions: Set[str],
    sizes: Sizes,
    *,
    returned: tuple[int, int] = (-1, 0),
    is_end: bool = False,
) -> Passages:
    """Returns the passages of the operations of a layer, of the embedding or of the head.

    regions: the names of the regions that are rebuilt.
    returned: the number of an operation, and the bytes that come back from host memory before its
        backward.
    is_end: whether they are the embedding or the head.
    """
    elsewhere = _counted_elsewhere(operations, sizes)
    course = list(held_in_backward(operations, regions, sizes))
    held = [
        _HeldBytes.of(_without(elsewhere, one.kept), _without(elsewhere, one.rebuilt), sizes)
        for one in course
    ]
    whole = _HeldBytes.of(_without(elsewhere, course[-1].kept), {}, sizes)
    backward = _backward(operations, held, sizes, begins=whole, more=returned, named_as_end=is_end)
    # What comes back is freed with the other tensors, which `whole` has already.
    end, kept = backward.end + returned[1], backward.kept + returned[1]
    return Passages(change(whole.allocated, kept=whole.kept), backward._replace(end=end, kept=kept))


def replayed_passages(
    layers: Sequence[LayerDescription],
    sizes: Sizes,
    *,
    results: Mapping[str, int] = NOTHING,
    between: Sequence[Passage] = (),
) -> Passages:
    """Returns the passages of layers that keep their input, and rebuild the rest at once.

    layers: the layers of a unit, or one layer with an `ops(...)` policy.
    results: the names and bytes of the operators' results that are kept besides. They are held
        until the backward ends.
    between: what happens after the backward of each layer but the last one to run.
    """
    first = layers[0].input
    kept = {first.name: first.num_bytes, **results, "generators": sizes.rng_state_bytes}
    whole = _HeldBytes.of(kept, {}, sizes)
    backward, rebuilt, allocated = [], 0, 0
    for number, layer in enumerate(layers):
        skipped = _counted_elsewhere(layer.operations, sizes) | results.keys()
        skipped |= {first.name} if number == 0 else set()
        held = [
            _HeldBytes.of({}, _without(skipped, one.kept), sizes)
            for one in held_in_backward(layer.operations, frozenset(), sizes)
        ]
        # The caller of a replay holds the gradient of the output, so the gradient of the MLP's
        # input cannot be added to it in place.
        names = [one.name for one in layer.operations]
        is_last = number == len(layers) - 1 and not results
        apart = names.index(layer.absorbs) if is_last else -1, first.num_bytes
        one = _backward(layer.operations, held, sizes, begins=held[-1], more=apart)
        fullest = one.fullest
        backward.append(
            one._replace(
                fullest=fullest._replace(kept=0, rebuilt=fullest.rebuilt + rebuilt, layer=number)
            )
        )
        rebuilt, allocated = rebuilt + held[-1].rebuilt, allocated + held[-1].allocated
    parts = [one for pair in zip_longest(reversed(backward), between) for one in pair if one]
    return Passages(
        change(whole.allocated, kept=whole.kept),
        joined(change(allocated), *parts, change(-whole.allocated, kept=-whole.kept)),
    )


def ops_results(layer: LayerDescription, ops: Sequence[str], *, skip_tail: bool) -> dict[str, int]:
    """Returns the names and bytes of the results that an `ops(...)` policy keeps."""
    return {
        tensor.name: tensor.num_bytes
        for _, call in kept_calls(layer, ops, skip_tail=skip_tail)
        for tensor in call.returns
    }


class _HeldBytes(NamedTuple):
    """The bytes that are held while the backward of an operation runs.

    allocated: kept and rebuilt bytes together, with the allocator's rounding.
    """

    kept: int
    rebuilt: int
    allocated: int

    @classmethod
    def of(cls, kept: Mapping[str, int], rebuilt: Mapping[str, int], sizes: Sizes) -> _HeldBytes:
        tensors = (*kept.values(), *rebuilt.values())
        return cls(sum(kept.values()), sum(rebuilt.values()), sum(map(sizes.allocated, tensors)))


def _backward(
    operations: Sequence[Operation],
    held: Sequence[_HeldBytes],
    sizes: Sizes,
    *,
    begins: _HeldBytes,
    more: tuple[int, int],
    named_as_end: bool = False,
) -> Passage:
    """Returns the passage of the backward of operations.

    held: what is held at each of them. begins: what is held when the backward begins.
    more: the number of an operation, and further bytes that are held from its backward on.
    """
    most, fullest, left = 0, Moment(), 0
    for number in reversed(range(len(operations))):
        operation = operations[number]
        one, beside = held[number], more[1] if number <= more[0] else 0
        num_bytes = one.allocated - begins.allocated + beside + left
        num_bytes += 0 if operation.gradients_in_forward else operation.temporary
        if num_bytes > most or not fullest.where:
            most = max(num_bytes, 0)
            where = f"backward of {operation.name}"
            if named_as_end:
                where = f"backward of {end_name(operation)}"
            layer = None if named_as_end else 0
            fullest = Moment(where, one.kept - begins.kept, one.rebuilt, layer)
        # Under FSDP2 gradients live until their unit is reduced.
        if not sizes.sums_gradients:
            elements = sum(parameter.num_elements for parameter in operation.parameters)
            left += elements * sizes.element_bytes
    return Passage(most, left - begins.allocated, -begins.kept, fullest)


def end_name(operation: Operation) -> str:
    """Returns the name of an operation of the embedding or the head in a sentence."""
    return f"the {operation.name.replace('_', ' ')}"


def _without(names: Set[str], tensors: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in tensors.items() if name not in names}


def _counted_elsewhere(operations: Sequence[Operation], sizes: Sizes) -> frozenset[str]:
    """Returns the names of tables that layers share, and of tensors of the micro-batch."""
    return frozenset(
        tensor.name
        for one in operations
        for tensor in (*one.keeps, *(t for entry in one.enters for t in entry.kept(sizes)))
        if tensor.shared or tensor.given
    )
