"""The bytes that one micro-batch keeps for backward on one rank, in closed form: a sum of tensors.

    activation_bytes    on the device, or in host memory (@host)

Every tensor is a storage that lives from forward to backward and is no parameter.
memory/measure/meter.py measures the same figure, and the two are equal to the byte. The sum has
more terms than sbh(34 + 5as/h)/t of arXiv 2205.05198, such as the statistics of norms.
The tensors come from description/.

`replayed_calls` are the operator calls of a layer that run again in backward: FLOPs, collectives
and the report of a plan are sums over them. A replay issues the same collectives as the forward,
with three exceptions: the one after the last fc2 if its output is skipped; those whose results an
`ops(...)` policy keeps; and an additional all-gather first if the unit's input was split over the
ranks. Collectives are those of one micro-batch on one rank, without the reductions of gradients.
Standard library only.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from megatron_lite.config.policy import Choice
from megatron_lite.config.regions import REGIONS
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.operations import (
    KeptTensor,
    LayerDescription,
    Operation,
    OperatorCall,
)
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment


def replayed_calls(
    layers: Sequence[LayerDescription], segment: Segment, skip_tail: bool
) -> Iterator[tuple[Operation, OperatorCall]]:
    """Yields the calls of the segment's layers that backward runs again, in the order of the
    forward.

    layers: the descriptions of the stage's layers.
    """
    for number in segment.numbers:
        layer, is_end = layers[number], skip_tail and number == segment.numbers[-1]
        if segment.ops:
            yield from calls_of_ops(layer, segment.ops, skip_tail, kept=False)
            continue
        skipped = layer.tail() if is_end and segment.unit else frozenset()
        # Only the output of a unit or region depends on its last matmul, and nothing reads the
        # output of a replay.
        in_region = skipped.union(*map(layer.tail, segment.rebuilt if skip_tail else ()))
        for operation in layer.operations:
            again = not segment.rebuilt.isdisjoint(operation.regions)
            # A unit's replay runs its regions in full, which run once more in their backward,
            # except the one at its end, of which nothing reads the output.
            runs = [skipped] * (segment.unit and not (again and is_end)) + [in_region] * again
            for left_out in runs:
                yield from (
                    (operation, call)
                    for position, call in enumerate(operation.calls)
                    if (operation.name, position) not in left_out and not call.once
                )


def replayed_operations(
    layers: Sequence[LayerDescription], segment: Segment, skip_tail: bool
) -> list[Operation]:
    """Returns the operations whose kernels besides matmuls and collectives run in a replay.

    layers: the descriptions of the stage's layers.
    """
    again = [one for number in segment.numbers for one in layers[number].operations]
    if not segment.is_whole:
        return [one for one in again if not segment.regions.isdisjoint(one.regions)]
    # the last operation adds the output of the tail to the residual
    return again[:-1] if skip_tail else again


def calls_of_ops(
    layer: LayerDescription, ops: Sequence[str], skip_tail: bool, *, kept: bool
) -> Iterator[tuple[Operation, OperatorCall]]:
    """Yields the calls of a layer whose results an `ops(...)` policy keeps, or all others.

    A tail that is skipped is neither kept nor run again.
    """
    choice, tail = Choice(ops), layer.tail() if skip_tail else frozenset()
    for operation in layer.operations:
        for position, call in enumerate(operation.calls):
            # `choice` counts the calls (matmul/2), so it is asked once for each, in order.
            is_asked = choice.keeps(call.operator) is kept
            if is_asked and (operation.name, position) not in tail and not call.once:
                yield operation, call


EMBEDDING, HEAD, UNIT = "embedding", "head", "unit"


class Term(NamedTuple):
    """A kept tensor and its place.

    layer: the number of the layer in its stage; None before the first layer and after the last.
    operation: the name of the first operation that keeps it.
    on_host: whether it waits for backward in host memory. A tensor in an arena counts with its own
        bytes, like any other.
    module: the module that runs the operation, by its name within the layer; None if no single
        module keeps the tensor.
    """

    layer: int | None
    operation: str
    tensor: KeptTensor
    on_host: bool = False
    module: str | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor."""
        return self.tensor.num_bytes


def activation_terms(plan: RecomputePlan, sizes: Sizes) -> tuple[Term, ...]:
    """Returns every tensor that is kept, in the order of the forward."""
    layers = describe_layers(sizes, plan.tiles)
    terms = list(_end_terms(EMBEDDING, embedding_operations(sizes)))
    for segment in plan.segments:
        terms += segment_terms(layers, plan, segment, sizes)
    terms += _end_terms(HEAD, head_operations(sizes))
    once = dict[str | int, Term]()
    for number, one in enumerate(terms):
        # A tensor that layers share counts once, at its first occurrence.
        once.setdefault(one.tensor.name if one.tensor.shared else number, one)
    return tuple(once.values())


def activation_bytes(plan: RecomputePlan, sizes: Sizes, *, on_host: bool = False) -> int:
    """Returns the sum of the `activation_terms` on the device, or in host memory."""
    terms = activation_terms(plan, sizes)
    return sum(term.num_bytes for term in terms if term.on_host is on_host)


def layer_terms(
    operations: Iterable[Operation], number: int, rebuilt: Set[str], sizes: Sizes
) -> Iterator[Term]:
    """Yields the tensors that the operations of one layer keep if the named regions are recomputed.

    number: the layer's number in its stage, for the terms.
    """
    operations = tuple(operations)
    # A rebuilt region's discarded outputs are freed. Operations that save them keep nothing.
    seen = {name for one in operations if one.entered in rebuilt for name in one.discards}
    for operation in operations:
        kept, keeper = operation.keeps, operation.name
        # The outermost region alone: it runs those inside of it again.
        if outermost := next(filter(rebuilt.__contains__, operation.regions), ""):
            kept, keeper = (), f"{outermost} (rebuilt)"
            if operation.entered == outermost:
                kept = operation.enters
                if REGIONS[outermost].method == "replay":
                    kept += (_rng_states(sizes, f" of {outermost}"),)
        # Several operations may keep one storage. It counts with the first of them.
        for tensor in kept:
            if tensor.name not in seen:
                seen.add(tensor.name)
                yield Term(number, keeper, tensor, module=operation.module)


def segment_terms(
    layers: tuple[LayerDescription, ...], plan: RecomputePlan, segment: Segment, sizes: Sizes
) -> Iterator[Term]:
    """Yields the tensors that a segment keeps. layers: those of the whole plan."""
    first, terms = segment.first_layer, list[Term]()
    if not segment.is_whole:
        for number in segment.numbers:
            terms += layer_terms(layers[number].operations, number, segment.rebuilt, sizes)
    else:
        # A unit keeps only its input (1/t of it if split) and the states of the random-number
        # streams. A layer with an `ops(...)` policy keeps these and the results of the chosen
        # operators.
        kept, size = layers[first].input, sizes.tp_size
        if segment.split:
            name = f"1/{size} of the layer input"
            kept = kept._replace(name=name, num_bytes=kept.num_bytes // size)
        terms = [Term(first, UNIT, kept), Term(first, UNIT, _rng_states(sizes))]
        for number in segment.numbers:
            terms += (Term(number, UNIT, choice) for choice in layers[number].choices)
        terms += (
            Term(first, operation.name, tensor, module=operation.module)
            for operation, call in calls_of_ops(
                layers[first], segment.ops, plan.skip_tail, kept=True
            )
            for tensor in call.returns
        )
    for term in terms:
        parts = segment.host_modules
        moves = segment.on_host and not term.tensor.stays and (not parts or term.module in parts)
        yield term._replace(on_host=True) if moves else term


def _rng_states(sizes: Sizes, of: str = "") -> KeptTensor:
    """Returns the states of random-number streams that a replay needs. They lie in host memory."""
    return KeptTensor(f"RNG states{of}", sizes.rng_state_bytes, stays=True)


def _end_terms(name: str, operations: Iterable[Operation]) -> Iterator[Term]:
    return (Term(None, name, tensor) for operation in operations for tensor in operation.keeps)
