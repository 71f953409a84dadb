"""What is held while the backward of a layer, of the embedding or of the head runs.

    kept       tensors from the forward, which are freed after the backward of the first operation
               that keeps them
    rebuilt    tensors that the replay of a region, or of the whole layer, has made again
    other      the operation's largest temporary, and gradients that live on

Tables that layers share and tensors of the micro-batch are not among them. Standard library only.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from megatron_lite.description.operations import KeptTensor, Operation
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.kept_tensors import layer_terms
from megatron_lite.memory.predict.walk import Moment


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
    operations: Sequence[Operation],
    sizes: Sizes,
    *,
    regions: Set[str] = frozenset(),
    replays_but: Set[str] | None = None,
    returned: tuple[int, int] = (-1, 0),
    beside: tuple[int, int] = (-1, 0),
    is_end: bool = False,
) -> LayerBackward:
    """Returns the backward of the operations.

    regions: the names of the regions that are rebuilt.
    replays_but: of a layer that is replayed as a whole, the names of what is kept.
    returned: the number of an operation, and the bytes that come back from the host before it.
    beside: the number of an operation, and further bytes that are held from its backward on.
    is_end: whether the operations are no layer.
    """

    def bytes_of(tensors: Iterable[KeptTensor], but: Set[str] = frozenset()) -> int:
        own = {one.name: one for one in tensors if not (one.shared or one.given)}
        return sum(sizes.allocated(own[name].num_bytes) for name in own.keys() - but)

    fullest, left, at_first = Moment(), 0, (0, 0)
    replayed = []
    for number in reversed(range(len(operations))):
        operation, done = operations[number], operations[: number + 1]
        held = [term.tensor for term in layer_terms(done, 0, regions, sizes)]
        again, kept = list(_rebuilt(operations, number, regions)), 0
        if replays_but is None:
            kept, rebuilt = bytes_of(held), bytes_of(again, {one.name for one in held})
        else:
            again += held
            rebuilt = bytes_of(again, replays_but)
        if not fullest.where:
            at_first = kept, 0 if replays_but is None else rebuilt
        kept += (returned[1] if number <= returned[0] else 0) - at_first[0]
        if again or number == returned[0]:
            replayed.append(kept + rebuilt)
        other = left + (0 if operation.gradients_in_forward else operation.temporary)
        other += beside[1] if number <= beside[0] else 0
        name = end_name(operation) if is_end else operation.name
        found = Moment(f"backward of {name}", None, kept, rebuilt, other)
        if not fullest.where or found.num_bytes > fullest.num_bytes:
            fullest = found
        # Under FSDP2 gradients live until their unit is reduced.
        if not sizes.sums_gradients:
            elements = sum(parameter.num_elements for parameter in operation.parameters)
            left += elements * sizes.element_bytes
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
    operation = operations[number]
    # Backward rebuilds a tensor at an operation in two cases. Either the operation saved a
    # discarded output, or it lies in a rebuilt region and saves a tensor.
    in_region = not regions.isdisjoint(operation.regions)
    if in_region or any(tensor.name in discarding for tensor in operation.keeps):
        for again in _run_again(operations[: number + 1], regions):
            yield from again.keeps
            # A replayed operation may read a discarded output. Its region is then rebuilt too, and
            # holds what the region's last operation saves.
            for name in {tensor.name for tensor in again.keeps} & discarding.keys():
                region = discarding[name][0]
                makers = [one for one in operations[:number] if region in one.regions]
                yield from (tensor for one in makers[-1:] for tensor in one.keeps)
    # A rebuilt output that its region discards lives until the region's first backward ends, and
    # with it what the region saves: other operations may run between the two (a shared norm).
    for tensor in (t for one in operations[number + 1 :] for t in one.keeps):
        region, at = discarding.get(tensor.name, ("", number + 1))
        if at == number or (at < number and region not in operation.regions):
            yield tensor
            for again in operations[at:number]:
                yield from again.keeps if region in again.regions else ()


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
