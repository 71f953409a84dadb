"""The operations of a layer that keep each tensor for backward. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence, Set

from megatron_lite.description.operations import Operation
from megatron_lite.description.sizes import Sizes


def first_keepers(operations: Sequence[Operation]) -> dict[str, int]:
    """Returns the number of the first operation that keeps each tensor if nothing is rebuilt."""
    found: dict[str, int] = {}
    for number, one in enumerate(operations):
        for tensor in one.keeps:
            found.setdefault(tensor.name, number)
    return found


def inputs_until(
    operations: Sequence[Operation], regions: Set[str], sizes: Sizes
) -> dict[str, int]:
    """Returns after which operation's backward each kept tensor is freed, if regions are rebuilt.

    It is the first operation that keeps the tensor, or the first one of a rebuilt region that has
    it as an input.
    """
    found: dict[str, int] = {}
    for number, one in enumerate(operations):
        names = {
            tensor.name
            for entry in one.enters
            if entry.region in regions
            for tensor in entry.kept(sizes)
        }
        if regions.isdisjoint(one.regions):
            names |= {tensor.name for tensor in one.keeps}
        for name in names:
            found.setdefault(name, number)
    return found
