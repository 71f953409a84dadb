"""The collectives of shared_memory.py, each as two steps for every chunk.

`publish` copies a chunk of this rank's operand into its slot. `collect` reads the slots of the
other ranks into the result. The operand must not be written to between the two, unless the
collective is in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_lite.parallel.gloo_order import chunk_elements, stretches

# Dtypes in which gloo sums too, and a number for each.
DTYPES = {
    dtype: number
    for number, dtype in enumerate(
        (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.int8,
            torch.uint8,
        )
    )
}
Combine = Callable[..., Tensor]
# gloo's own MAX and MIN pass a NaN of some ranks on and hide that of others; these pass on each.
COMBINES: dict[str, Combine] = {"SUM": torch.add, "MAX": torch.maximum, "MIN": torch.minimum}
ALL_GATHER, REDUCE_SCATTER, BROADCAST, *ALL_REDUCE = range(1, 4 + len(COMBINES))


class Transfer(Protocol):
    """One collective under way.

    signature: a positive number of 32 bits, equal on all ranks, and different for most other
        collectives.
    chunks: the number of chunks, at least one.
    published, collected: how many of them this rank has published and collected.
    sources: the ranks whose slots this rank reads.
    """

    signature: int
    chunks: int
    published: int
    collected: int
    sources: Sequence[int]

    def publish(self, chunk: int, slot: Tensor) -> None:
        """Copies this rank's chunk into its slot, uint8 [bytes of a slot]."""

    def collect(self, chunk: int, slots: Sequence[Tensor]) -> None:
        """Reads the chunk from the slots of all ranks, in rank order."""


class _Chunked:
    """The chunks of `length` elements, each of at most `step`."""

    def __init__(self, kind: int, tensor: Tensor, length: int, step: int, sources: Sequence[int]):
        # 5 bits for the kind, 3 for the dtype and 24 for the length
        self.signature = kind | DTYPES[tensor.dtype] << 5 | (length % 2**24) << 8
        self.published = self.collected = 0
        self.sources = sources
        self._dtype, self._width = tensor.dtype, tensor.element_size()
        self._length, self._step = length, step
        self.chunks = max(1, -(-length // step))

    def __str__(self) -> str:
        return f"{type(self).__name__} of {self._length} elements of {self._dtype}"

    def _span(self, chunk: int) -> tuple[int, int]:
        return chunk * self._step, min(self._length, (chunk + 1) * self._step)

    def _view(self, slot: Tensor, num_elements: int) -> Tensor:
        return slot[: num_elements * self._width].view(self._dtype)


class AllReduce(_Chunked):
    """Fills contiguous `result` with the reduction of `operand`. Each rank reads all others."""

    def __init__(
        self, result: Tensor, operand: Tensor, op: str, *, rank: int, size: int, slot_bytes: int
    ) -> None:
        width, kind = result.element_size(), ALL_REDUCE[list(COMBINES).index(op)]
        super().__init__(kind, result, result.numel(), slot_bytes // width, range(size))
        self._result, self._operand = result.view(-1), operand.reshape(-1)
        self._combine, self._rank, self._size = COMBINES[op], rank, size
        self._order = chunk_elements(result.numel(), width, size)

    def publish(self, chunk: int, slot: Tensor) -> None:
        start, stop = self._span(chunk)
        self._view(slot, stop - start).copy_(self._operand[start:stop])

    def collect(self, chunk: int, slots: Sequence[Tensor]) -> None:
        first, last = self._span(chunk)
        if self._size == 2:
            # a + b has the same bits as b + a, so this rank's operand need not be read from a slot.
            other = self._view(slots[1 - self._rank], last - first)
            self._combine(self._operand[first:last], other, out=self._result[first:last])
            return
        # This rank's operand comes from its slot too: in place, the first sum overwrites it.
        views = [self._view(slot, last - first) for slot in slots]
        for start, stop, ranks in stretches(first, last, self._order, self._size):
            _combine_into(
                self._result[start:stop],
                [views[rank][start - first : stop - first] for rank in ranks],
                self._combine,
            )


class ReduceScatter(_Chunked):
    """Fills contiguous `own` [n] with this rank's part of the sum of `tensor` [n * size].

    `own` may be this rank's part of `tensor`. A slot has a row for each rank.
    """

    def __init__(
        self, own: Tensor, tensor: Tensor, *, rank: int, size: int, slot_bytes: int
    ) -> None:
        width = tensor.element_size()
        step = slot_bytes // (width * size)
        super().__init__(REDUCE_SCATTER, tensor, own.numel(), step, range(size))
        self._own, self._rows, self._rank = own.view(-1), tensor.reshape(size, own.numel()), rank
        self._order = chunk_elements(tensor.numel(), width, size)

    def publish(self, chunk: int, slot: Tensor) -> None:
        start, stop = self._span(chunk)
        size = len(self._rows)
        rows = self._view(slot, size * (stop - start)).view(size, stop - start)
        if size == 2:  # the other rank reads its own row only
            other = 1 - self._rank
            rows[other].copy_(self._rows[other, start:stop])
        else:
            rows.copy_(self._rows[:, start:stop])

    def collect(self, chunk: int, slots: Sequence[Tensor]) -> None:
        first, last = self._span(chunk)
        size = len(self._rows)
        views = [
            self._view(slot, size * (last - first)).view(size, last - first)[self._rank]
            for slot in slots
        ]
        if size == 2:
            mine = self._rows[self._rank, first:last]
            torch.add(mine, views[1 - self._rank], out=self._own[first:last])
            return
        before = self._rank * self._length  # elements of the parts of lower ranks
        for start, stop, ranks in stretches(before + first, before + last, self._order, size):
            start, stop = start - before, stop - before
            _combine_into(
                self._own[start:stop],
                [views[rank][start - first : stop - first] for rank in ranks],
                torch.add,
            )


class AllGather(_Chunked):
    """Fills contiguous `gathered` [n * size] with every rank's `own` [n], in rank order."""

    def __init__(
        self, gathered: Tensor, own: Tensor, *, rank: int, size: int, slot_bytes: int
    ) -> None:
        super().__init__(
            ALL_GATHER, own, own.numel(), slot_bytes // own.element_size(), range(size)
        )
        self._rows, self._own, self._rank = gathered.view(size, own.numel()), own.reshape(-1), rank
        self._in_place = self._rows[rank].data_ptr() == self._own.data_ptr()

    def publish(self, chunk: int, slot: Tensor) -> None:
        start, stop = self._span(chunk)
        self._view(slot, stop - start).copy_(self._own[start:stop])

    def collect(self, chunk: int, slots: Sequence[Tensor]) -> None:
        start, stop = self._span(chunk)
        for rank, slot in enumerate(slots):
            if rank != self._rank:
                self._rows[rank, start:stop].copy_(self._view(slot, stop - start))
            elif not self._in_place:
                self._rows[rank, start:stop].copy_(self._own[start:stop])


class Broadcast(_Chunked):
    """Overwrites contiguous `tensor` with that of rank `source`."""

    def __init__(self, tensor: Tensor, *, rank: int, source: int, slot_bytes: int) -> None:
        super().__init__(
            BROADCAST, tensor, tensor.numel(), slot_bytes // tensor.element_size(), (source,)
        )
        self._flat, self._is_source, self._source = tensor.view(-1), rank == source, source

    def publish(self, chunk: int, slot: Tensor) -> None:
        if self._is_source:
            start, stop = self._span(chunk)
            self._view(slot, stop - start).copy_(self._flat[start:stop])

    def collect(self, chunk: int, slots: Sequence[Tensor]) -> None:
        if not self._is_source:
            start, stop = self._span(chunk)
            self._flat[start:stop].copy_(self._view(slots[self._source], stop - start))


def _combine_into(result: Tensor, operands: Sequence[Tensor], combine: Combine) -> None:
    """Writes the combination of the operands, in their order, into `result`, which is none."""
    combine(operands[0], operands[1], out=result)
    for operand in operands[2:]:
        combine(result, operand, out=result)
