"""The description of what long sequences need, as changes of a layer's operations: an MLP in tiles,
and attention between exchanges of heads. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_lite.config.regions import CORE_ATTENTION
from megatron_lite.description.operations import (
    ALL_TO_ALL,
    Collective,
    KeptTensor,
    Moved,
    Operation,
    RegionEntry,
)
from megatron_lite.description.sizes import Shape


def in_tiles(of: Shape, tile: Sequence[Operation], tiles: int) -> Iterator[Operation]:
    """Yields the operations of an MLP that runs in tiles. tile: those of one.

    Beside a tile there are the gradient of the whole input, and the sums of gradients that autograd
    gets, with those of the operations that the tile's backward has left.
    """
    by_hand = of.sizes.sums_gradients and of.sizes.adds_by_itself
    gradients = [
        0 if by_hand else of.element * sum(each.num_elements for each in one.parameters)
        for one in tile
    ]
    for number, one in enumerate(tile):
        left = sum(gradients[number + 1 :]) * of.sizes.sums_gradients
        yield one._replace(
            calls=one.calls * tiles,
            backward=one.backward * tiles,
            moved=Moved(*(tiles * moved for moved in one.moved)),
            temporary=one.temporary + of.hidden + sum(gradients) + left,
        )


def with_heads_exchanged(of: Shape, core: Operation, inputs: tuple[KeptTensor, ...]) -> Operation:
    """Returns attention of some heads with the exchanges around it (head_exchange.py).

    core: the attention. inputs: those of all heads, of this rank's tokens.
    """
    sizes = dict(query=of.query, key=of.kv, value=of.value, output=of.attended)
    sent = tuple(Collective(ALL_TO_ALL, num_bytes) for num_bytes in sizes.values())
    *before, after = (
        one.call(f"received {name}", output_only=name == "output")
        for name, one in zip(sizes, sent, strict=True)
    )
    return core._replace(
        enters=(RegionEntry(CORE_ATTENTION, inputs),),
        calls=(*before, *core.calls, after),
        backward=sent,
        temporary=core.temporary + 2 * of.query,
    )
