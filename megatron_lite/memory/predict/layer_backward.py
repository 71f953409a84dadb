"""What is held while the backward of a layer, of the embedding or of the head runs.

    kept       tensors from the forward, which are freed after the backward of the first operation
               that keeps them
    rebuilt    tensors that the replay of a region, or of the whole layer, has made again
    other      the operation's largest temporary, and gradients that live on

Tables that layers share and tensors of the micro-batch are not among them. Standard library only.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from megatron_lite.description.operations import KeptTensor, LayerDescription, Operation
from megatron_lite.description.sizes import Sizes
from megatron_lite.recompute.recompute_plan import Segment

from .kept_tensors import Term, layer_terms
from .walk import Moment


class LayerBackward(NamedTuple):
    """A backward of some operations.

    fullest: what is held at its fullest moment, relative to what the forward has kept of it.
    replayed: the most activations right after something was rebuilt, or came back from the host,
        relative to the same; None if nothing was.
    kept: what the forward has kept of it. rebuilt: what a replay of all of it rebuilds.
    left: the gradients of parameters that live on.
    """

    fullest: Moment
    replayed: int | None
    kept: int
    rebuilt: int
    left: int


def layer_backward(
    layer: LayerDescription,
    segment: Segment,
    terms: Sequence[Term],
    sizes: Sizes,
    is_first: bool = True,
    is_last: bool = True,
    returned: int = 0,
    *,
    is_end: bool = False,
) -> LayerBackward:
    """Returns the backward of a layer of a segment.

    terms: what the segment keeps.
    is_first, is_last: whether the layer is the first of the segment, and the last.
    returned: the bytes that come back from the host when the first of them is read.
    is_end: whether it is no layer, but the embedding or the head.
    """

    def bytes_of(tensors: Iterable[KeptTensor], but: Set[str] = frozenset()) -> int:
        own = {one.name: one for one in tensors if not (one.shared or one.given)}
        return sum(sizes.allocated(own[name].num_bytes) for name in own.keys() - but)

    operations, whole = layer.operations, segment.is_whole
    kept_names = frozenset[str]()  # of a layer that is replayed as a whole
    if whole and is_first:
        kept_names |= {layer.input.name, *(one.tensor.name for one in terms)}
    awaited = segment.on_host and not whole
    moved = {one.tensor.name for one in terms if segment.host_modules and one.on_host}
    moments, replayed, at_first = list[Moment](), list[int](), (0, 0)
    here = left = beside = 0  # what came back, gradients of parameters and of the layer's output
    for number, operation in reversed(list(enumerate(operations))):
        done = operations[: number + 1]
        held = [one.tensor for one in layer_terms(done, 0, segment.rebuilt, sizes)]
        again, kept = list(_rebuilt(operations, number, segment.rebuilt)), 0
        if whole:
            again += held
            rebuilt = bytes_of(again, kept_names)
        else:
            kept, rebuilt = bytes_of(held), bytes_of(again, {one.name for one in held})
        if not moments:
            at_first = kept, rebuilt * whole
        reads = awaited and not (moved and moved.isdisjoint(one.name for one in operation.keeps))
        if reads:
            awaited, here = False, returned
        kept += here - at_first[0]
        if again or reads:
            replayed.append(kept + rebuilt)
        if segment.unit and is_last and operation.name == layer.absorbs:
            # The caller of a replay holds the gradient of the output, so the gradient of the MLP's
            # input cannot be added to it in place.
            beside = layer.input.num_bytes
        other = left + beside + operation.temporary * (not operation.gradients_in_forward)
        name = end_name(operation) if is_end else operation.name
        moments.append(Moment(f"backward of {name}", None, kept, rebuilt, other))
        # Under FSDP2 gradients live until their unit is reduced.
        if not sizes.sums_gradients:
            elements = sum(parameter.num_elements for parameter in operation.parameters)
            left += elements * sizes.element_bytes
    fullest = max(moments, key=lambda one: one.num_bytes, default=Moment())
    return LayerBackward(fullest, max(replayed, default=None), *at_first, left)


def _rebuilt(
    operations: Sequence[Operation], number: int, regions: Set[str]
) -> Iterator[KeptTensor]:
    """Yields the tensors that replays of regions have made when the backward of an operation runs.

    regions: the names of the regions that are rebuilt.
    """
    discarding = {
        name: (one.entered, at)
        for at, one in enumerate(operations)
        if one.entered in regions
        for name in one.discards
    }
    operation, again = operations[number], list[Operation]()
    # Backward rebuilds a tensor at an operation in two cases. Either the operation saved a
    # discarded output, or it lies in a rebuilt region and saves a tensor.
    reads = any(tensor.name in discarding for tensor in operation.keeps)
    if reads or not regions.isdisjoint(operation.regions):
        again += _run_again(operations[: number + 1], regions)
        yield from (tensor for one in again for tensor in one.keeps)
    # A discarded output that is read now, also by a replay, is rebuilt. It lives until its region's
    # first backward ends, and with it what the region saves: other operations may run between the
    # two (a shared norm).
    for tensor in (t for one in (*again, *operations[number + 1 :]) for t in one.keeps):
        region, at = discarding.get(tensor.name, ("", number + 1))
        if at == number or (at < number and region not in operation.regions):
            yield tensor
            for one in operations[at:number]:
                yield from one.keeps if region in one.regions else ()


def _run_again(done: Sequence[Operation], regions: Set[str]) -> Sequence[Operation]:
    """Returns the last operation, and those before it in the same passage of a rebuilt region."""
    first = len(done) - 1
    inside = regions & frozenset(done[-1].regions)
    while first > 0 and not (
        done[first].entered in inside or inside.isdisjoint(done[first - 1].regions)
    ):
        first -= 1
    return done[first:]


def end_name(operation: Operation) -> str:
    """Returns the name of an operation of the embedding or of the head, in words."""
    return f"the {operation.name.replace('_', ' ')}"
