"""The tensors that a layer holds while its backward runs, operation by operation.

    kept       tensors from the forward, which are freed after the backward of the first operation
               that keeps them
    rebuilt    tensors that the replay of a region has made again

The activation peak (peak.py) is the largest sum of both. The peak of a step (stage_course.py)
adds each operation's largest temporary. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from megatron_lite.description.operations import KeptTensor, Operation
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.kept_tensors import layer_terms


class HeldTensors(NamedTuple):
    """The tensors that are held while the backward of one operation runs, as {name: bytes}.

    rebuilds: whether a replay makes a tensor right before this backward.
    """

    kept: dict[str, int]
    rebuilt: dict[str, int]
    rebuilds: bool


def held_in_backward(
    operations: Sequence[Operation], regions: Set[str], sizes: Sizes
) -> Iterator[HeldTensors]:
    """Yields what a layer holds at the backward of each operation, in the order of the forward.

    Tables that layers share and tensors of the micro-batch are not among them.

    regions: the names of the regions that are rebuilt.
    """

    def bytes_of(tensors: Iterable[KeptTensor]) -> dict[str, int]:
        return {
            one.name: sizes.allocated(one.num_bytes)
            for one in tensors
            if not (one.shared or one.given)
        }

    discarding = {
        name: (entry.region, number)
        for number, operation in enumerate(operations)
        for entry in operation.enters
        if entry.region in regions
        for name in entry.discards
    }
    for number, operation in enumerate(operations):
        done = operations[: number + 1]
        kept = bytes_of(term.tensor for term in layer_terms(done, 0, regions, sizes))
        # Backward rebuilds a tensor at an operation in two cases. Either the operation saved a
        # discarded output, or it lies in a rebuilt region and saves a tensor.
        reads_discarded = any(tensor.name in discarding for tensor in operation.keeps)
        in_region = not regions.isdisjoint(operation.regions) and bool(operation.keeps)
        rebuilt: dict[str, int] = {}
        for again in _run_again(done, regions) if reads_discarded or in_region else ():
            rebuilt |= bytes_of(again.keeps)
            # A replayed operation may read a discarded output. Its region is then rebuilt too, and
            # holds what the region's last operation saves.
            for region in {
                discarding[tensor.name][0] for tensor in again.keeps if tensor.name in discarding
            }:
                makers = [one for one in done[:number] if region in one.regions]
                rebuilt |= bytes_of(tensor for one in makers[-1:] for tensor in one.keeps)
        # A rebuilt output that its region discards lives until the region's first backward ends.
        rebuilt |= bytes_of(
            tensor
            for one in operations[number + 1 :]
            for tensor in one.keeps
            if tensor.name in discarding and discarding[tensor.name][1] == number
        )
        new = {name: size for name, size in rebuilt.items() if name not in kept}
        yield HeldTensors(kept, new, reads_discarded or in_region)


def _run_again(done: Sequence[Operation], regions: Set[str]) -> Sequence[Operation]:
    """Returns the last operation, and those before it in the same passage of a rebuilt region."""
    first = len(done) - 1
    inside = regions & frozenset(done[-1].regions)
    while first > 0 and not inside.isdisjoint(done[first - 1].regions):
        if any(entry.region in inside for entry in done[first].enters):
            break
        first -= 1
    return done[first:]
