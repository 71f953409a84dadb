"""Exchanges keys and values, and their gradients, between context-parallel ranks.

A part is the keys and values of one rank, [2, n, b, g, d] with n = s/c.

    p2p         The parts travel around a ring (2310.01889). A rank computes with a part while it
                sends the part on. In backward the gradients travel one step behind the parts, and
                each rank adds its own. A rank holds two parts at a time.
    allgather   One all-gather of all parts (2407.21783 sec. 3.3.2), and one reduce-scatter of the
                gradients. A rank holds c parts.

    received per rank        forward            backward
    p2p                      c - 1 parts        2c - 1 parts
    allgather                c - 1 parts        2 (c - 1) parts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import (
    Started,
    reduce_scatter_first_dim,
    start_all_gather_first_dim,
    start_shift,
)


class KeysValuesOf(NamedTuple):
    """One part: the keys and values [2, n, b, g, d] of the rank `source`."""

    source: int
    keys_values: Tensor


class Exchange(NamedTuple):
    """The two functions of one way to exchange parts.

    parts: yields all parts: this rank's own first, and then those of the ranks before it.
    sum: returns the sum of the gradients of every rank's part, over all ranks, for tensors like the
        given part.
    """

    parts: Callable[[Tensor, ProcessGroup], Iterator[KeysValuesOf]]
    sum: Callable[[Tensor, ProcessGroup], RingSum | ScatteredSum]


def around_the_ring(own: Tensor, group: ProcessGroup) -> Iterator[KeysValuesOf]:
    """Yields all parts as they arrive around the ring.

    `own` must not be written to before all parts have arrived.
    """
    rank, size = group.rank(), group.size()
    current = own
    # Each part is sent on before it is yielded, so the transfer runs beside the caller's work.
    for step in range(size):
        onwards = start_shift(current, group) if step < size - 1 else None
        yield KeysValuesOf((rank - step) % size, current)
        current = own if onwards is None else onwards.wait()


class RingSum:
    """A sum that travels around the ring, in the tensors' dtype like a reduce-scatter.

    Parts come in ring order. The running sum of a part follows the part by one step: each rank
    receives it, adds its own gradients and sends it on. After the last rank the sum arrives at the
    part's owner.
    """

    def __init__(self, like: Tensor, group: ProcessGroup) -> None:
        self._like, self._group = like, group
        self._travelling: Started | None = None

    def add(self, source: int, tokens: slice, key: Tensor, value: Tensor) -> None:
        """Adds this rank's gradients for some tokens of the rank `source`.

        key, value: [m, b, g, d]. Call it once for each part, in the order in which the parts come.
        """
        total = (
            torch.zeros_like(self._like) if self._travelling is None else self._travelling.wait()
        )
        total[0, tokens] += key
        total[1, tokens] += value
        self._travelling = start_shift(total, self._group)

    def result(self) -> Tensor:
        """Returns the gradients of this rank's own part, summed over all ranks: [2, n, b, g, d]."""
        assert self._travelling is not None
        return self._travelling.wait()


def gathered(own: Tensor, group: ProcessGroup) -> Iterator[KeysValuesOf]:
    """Yields all parts from one all-gather, which runs beside the work on this rank's own part."""
    rank, size = group.rank(), group.size()
    gather = start_all_gather_first_dim(own, group)
    yield KeysValuesOf(rank, own)
    whole = gather.wait().view(size, *own.shape)
    for step in range(1, size):
        yield KeysValuesOf((rank - step) % size, whole[(rank - step) % size])


class ScatteredSum:
    """A sum that holds the gradients of all c parts and issues one reduce-scatter at the end."""

    def __init__(self, like: Tensor, group: ProcessGroup) -> None:
        self._group = group
        self._whole = like.new_zeros((group.size(), *like.shape))

    def add(self, source: int, tokens: slice, key: Tensor, value: Tensor) -> None:
        """Sets this rank's gradients for some tokens of the rank `source`, as RingSum.add."""
        # Each part comes once, so nothing is added. Tokens that no query here reads stay 0.
        self._whole[source, 0, tokens] = key
        self._whole[source, 1, tokens] = value

    def result(self) -> Tensor:
        """Returns what RingSum.result returns."""
        return reduce_scatter_first_dim(self._whole.flatten(0, 1), self._group)


EXCHANGES = {
    "p2p": Exchange(around_the_ring, RingSum),
    "allgather": Exchange(gathered, ScatteredSum),
}
