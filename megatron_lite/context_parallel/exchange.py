"""How each rank comes by the keys and values of the others, and they by the gradients of theirs. Whole: [2, n, b, g, d], n = s/c.

    p2p         parts travel around a ring (2310.01889): a rank works on one while it passes it on. In backward the gradients
                travel one step behind, and each rank that they visit adds its own. Holds two parts at a time.
    allgather   all parts at once (2407.21783 sec. 3.3.2), and a reduce-scatter of the gradients. Holds c parts.

    received per rank        forward            backward
    p2p                      c - 1 parts        2c - 1 parts
    allgather                c - 1 parts        2 (c - 1) parts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import reduce_scatter_first_dim, start_all_gather_first_dim
from megatron_lite.parallel.ring import Shift, start_shift


class Part(NamedTuple):
    """keys_values: [2, n, b, g, d] of the rank `source`."""

    source: int
    keys_values: Tensor


class GradientSum(Protocol):
    """Adds up the gradients of every rank's keys and values over all ranks."""

    def add(self, source: int, tokens: slice, key: Tensor, value: Tensor) -> None:
        """Those of some tokens of the rank `source`, each [m, b, g, d]; once for each part, in the order in which they come."""

    def result(self) -> Tensor:
        """Those of this rank's own, over all ranks: [2, n, b, g, d]."""


class Exchange(NamedTuple):
    """parts: all parts, this rank's own first, then those of the ranks before it. sum: for a tensor like one part."""

    parts: Callable[[Tensor, ProcessGroup], Iterator[Part]]
    sum: Callable[[Tensor, ProcessGroup], GradientSum]


def around_the_ring(own: Tensor, group: ProcessGroup) -> Iterator[Part]:
    """`own` must not be written to before all parts have come."""
    rank, size = group.rank(), group.size()
    current = own
    for step in range(size):
        onwards = start_shift(current, group) if step < size - 1 else None
        yield Part((rank - step) % size, current)
        current = own if onwards is None else onwards.wait()


class RingSum:
    """A sum in the tensors' dtype, as a reduce-scatter is."""

    def __init__(self, like: Tensor, group: ProcessGroup) -> None:
        self._like, self._group = like, group
        self._travelling: Shift | None = None

    def add(self, source: int, tokens: slice, key: Tensor, value: Tensor) -> None:
        """See GradientSum."""
        total = torch.zeros_like(self._like) if self._travelling is None else self._travelling.wait()
        total[0, tokens] += key
        total[1, tokens] += value
        self._travelling = start_shift(total, self._group)

    def result(self) -> Tensor:
        """See GradientSum."""
        assert self._travelling is not None
        return self._travelling.wait()


def gathered(own: Tensor, group: ProcessGroup) -> Iterator[Part]:
    """The gather runs beside the work on this rank's own part."""
    rank, size = group.rank(), group.size()
    gather = start_all_gather_first_dim(own, group)
    yield Part(rank, own)
    whole = gather.wait().view(size, *own.shape)
    for step in range(1, size):
        yield Part((rank - step) % size, whole[(rank - step) % size])


class ScatteredSum:
    """One reduce-scatter at the end."""

    def __init__(self, like: Tensor, group: ProcessGroup) -> None:
        self._group = group
        self._whole = like.new_zeros((group.size(), *like.shape))

    def add(self, source: int, tokens: slice, key: Tensor, value: Tensor) -> None:
        """See GradientSum."""
        self._whole[source, 0, tokens] = key
        self._whole[source, 1, tokens] = value

    def result(self) -> Tensor:
        """See GradientSum."""
        return reduce_scatter_first_dim(self._whole.flatten(0, 1), self._group)


EXCHANGES = {"p2p": Exchange(around_the_ring, RingSum), "allgather": Exchange(gathered, ScatteredSum)}
