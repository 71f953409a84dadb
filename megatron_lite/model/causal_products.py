"""Causal attention on a CPU by batched matrix products, a block of queries at a time.

torch's flash kernel for a CPU multiplies 16-bit tiles of 32 rows. Processors with instructions for
bf16 products, but without matrix tiles (AMX), compute large products several times faster, and so
do those without AVX-512, where the operands below are float32 (parallel/wide_products.py). Here
each block of queries has one product with all of its keys (FlashAttention-2, 2307.08691, section
3.1, with whole rows).

    S  = scale Q K^T                    float32, of float32 copies: bf16 scores would be too coarse
    P  = exp(S - lse)                   float32, rounded to bf16 for the next product
    O  = P V                            16-bit operands, as all that follow
    dV = sum of P^T dO                  the sum over the blocks is float32
    dS = scale P * (dO V^T - D)         float32, with D = rowsum(P * dO V^T): that is rowsum(dO * O)
                                        of an O that is not rounded
    dQ = dS K,  dK = sum of dS^T Q

Query and output are [s, b, a/t, d], key and value [s, b, g/t, d]. A part is one sample's heads of
some query groups, whose tile of scores stays in the cache. The queries of a group lie below each
other in one product, so keys and values are not repeated. All memory is taken once for all blocks,
because fresh memory costs a page fault for each page (description/attention_products.py counts it).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.description.attention_products import PartShape, query_rows
from megatron_lite.parallel.wide_products import widens

LN_2 = math.log(2.0)


class _Bf16Operands(contextlib.ContextDecorator):
    """Lets oneDNN round float32 operands of products to bf16, which changes no copy of bf16.

    The setting is one for all threads of a process. The last thread that leaves restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._before = 0, ""

    def __enter__(self) -> None:
        products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        with self._lock:
            if not self._inside:
                self._before = products.fp32_precision
                products.fp32_precision = "bf16"
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        with self._lock:
            self._inside -= 1
            if not self._inside:
                products.fp32_precision = self._before


_BF16_OPERANDS = _Bf16Operands()


@_BF16_OPERANDS
def attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the output [s, b, a/t, d] and the float32 log-sum-exp of each row, [b, a/t, s]."""
    s, b, heads, _ = query.shape
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = torch.empty((b, heads, s), dtype=torch.float32, device=query.device)
    memory = _BlockMemory(query, key)
    for part in _parts(query, key):
        queries, outputs = part.by_group(query), part.by_group(output)
        log_sums = part.rows_of(lse)
        keys = memory.wide_keys.copy(part.of_keys(key))
        values = memory.narrow_keys.copy(part.of_keys(value))
        for rows in query_rows(s):
            scores = memory.scores(queries[:, :, rows], keys, scale, rows)
            largest = torch.amax(scores, -1, out=memory.row_values.of(scores.shape[:2]))
            weights = scores.sub_(largest.unsqueeze(-1)).exp2_()
            sums = torch.sum(weights, -1, out=memory.other_values.of(scores.shape[:2]))
            weights.div_(sums.unsqueeze(-1))
            log_sums[:, :, rows] = part.by_head(largest.add_(sums.log2_()).mul_(LN_2))
            outputs[:, :, rows] = part.by_head(
                memory.weighted_rows(memory.narrow_tile.copy(weights), values[:, : rows.stop])
            )
    return output, lse


@_BF16_OPERANDS
def attend_by_products_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value, contiguous, in their shapes.

    The output is not read.
    """
    grad_query, grad_key, grad_value = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    memory = _BackwardBlockMemory(query, key)
    for part in _parts(query, key):
        queries, grads, grad_queries = (part.by_group(x) for x in (query, grad_output, grad_query))
        log_sums = part.rows_of(lse)
        keys = memory.wide_keys.copy(part.of_keys(key))
        narrow_keys = memory.narrow_keys.copy(part.of_keys(key))
        values = memory.wide_values.copy(part.of_keys(value))
        key_sums, value_sums = (
            sums.of(keys.shape).zero_() for sums in (memory.key_sums, memory.value_sums)
        )
        for rows in query_rows(query.shape[0]):
            read = slice(0, rows.stop)
            own = memory.grad_rows.copy(grads[:, :, rows]).flatten(1, 2)
            scores = memory.scores(queries[:, :, rows], keys, scale, rows)
            log_rows = memory.other_values.copy(log_sums[:, :, rows]).flatten(1).div_(LN_2)
            weights = scores.sub_(log_rows.unsqueeze(-1)).exp2_()
            tile = memory.narrow_tile.copy(weights)
            memory.add_(value_sums[:, read], tile, grads[:, :, rows])
            grad_scores = torch.bmm(
                own, values[:, read].transpose(1, 2), out=memory.second.of(scores.shape)
            )
            grad_scores.mul_(weights)
            # D. The weights of large scores do not sum to 1: scores and lse are rounded.
            sums = torch.sum(weights, -1, out=memory.other_values.of(own.shape[:2]))
            delta = torch.sum(grad_scores, -1, out=memory.row_values.of(own.shape[:2])).div_(sums)
            grad_scores.addcmul_(weights, delta.unsqueeze(-1), value=-1.0).mul_(scale)
            tile = memory.narrow_tile.copy(grad_scores)
            grad_queries[:, :, rows] = part.by_head(
                memory.weighted_rows(tile, narrow_keys[:, read])
            )
            memory.add_(key_sums[:, read], tile, queries[:, :, rows])
        part.of_keys(grad_key).copy_(key_sums)
        part.of_keys(grad_value).copy_(value_sums)
    return grad_query, grad_key, grad_value


class _HeadPart(NamedTuple):
    """The heads of one sample that are computed at a time.

    sample: its number in the micro-batch. groups: the range of the query groups. each: the heads of
    a group.
    """

    sample: int
    groups: slice
    each: int

    def by_group(self, x: Tensor) -> Tensor:
        """Returns the part of x [s, b, a/t, d] as a view [groups, a/g, s, d]."""
        return x[:, self.sample, self._heads].unflatten(1, (-1, self.each)).permute(1, 2, 0, 3)

    def of_keys(self, x: Tensor) -> Tensor:
        """Returns the part of x [s, b, g/t, d] as a view [groups, s, d]."""
        return x[:, self.sample, self.groups].transpose(0, 1)

    def rows_of(self, x: Tensor) -> Tensor:
        """Returns the part of x [b, a/t, s] as a view [groups, a/g, s]."""
        return x[self.sample, self._heads].unflatten(0, (-1, self.each))

    def by_head(self, x: Tensor) -> Tensor:
        """Returns x [groups, a/g n, ..] as a view [groups, a/g, n, ..]."""
        return x.unflatten(1, (self.each, -1))

    @property
    def _heads(self) -> slice:
        return slice(self.groups.start * self.each, self.groups.stop * self.each)


def _parts(query: Tensor, key: Tensor) -> Iterator[_HeadPart]:
    shape = _part_shape(query, key)
    for sample in range(query.shape[1]):
        for start in range(0, key.shape[2], shape.groups):
            groups = slice(start, min(start + shape.groups, key.shape[2]))
            yield _HeadPart(sample, groups, shape.each)


def _part_shape(query: Tensor, key: Tensor) -> PartShape:
    return PartShape.of(query.shape[0], query.shape[2], key.shape[2], query.shape[3])


class _Scratch:
    """A piece of memory of which every block takes the front."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.empty(elements, dtype=dtype, device=device)

    def of(self, shape: tuple[int, ...]) -> Tensor:
        """Returns a contiguous tensor of this shape at the front of the memory."""
        return self._memory[: math.prod(shape)].view(shape)

    def copy(self, x: Tensor) -> Tensor:
        """Returns a contiguous copy of x, in the memory's dtype."""
        return self.of(x.shape).copy_(x)


class _BlockMemory:
    """The memory of a forward, and the steps that backward has too.

    What has "wide" in its name is float32, and so are tiles of scores and values of rows. What has
    "narrow" in its name has the dtype of the heads, or float32 where 16-bit products are slow.
    """

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self.shape = _part_shape(query, key)
        self._dtype = torch.float32 if widens(query, onednn=True) else query.dtype
        self._device = query.device
        self._first, self.narrow_tile = self.wide(self.shape.tile), self.narrow(self.shape.tile)
        self.wide_keys, self.narrow_keys = (
            make(self.shape.keys) for make in (self.wide, self.narrow)
        )
        self._wide_rows, self._narrow_rows = (
            make(self.shape.rows) for make in (self.wide, self.narrow)
        )
        self.row_values, self.other_values = (self.wide(self.shape.row_values) for _ in range(2))
        square = (self.shape.longest, self.shape.longest)
        self._later = torch.full(square, -torch.inf, device=self._device).triu_(1)

    def wide(self, elements: int) -> _Scratch:
        """Returns float32 memory."""
        return _Scratch(elements, torch.float32, self._device)

    def narrow(self, elements: int) -> _Scratch:
        """Returns memory in the dtype of products with weights."""
        return _Scratch(elements, self._dtype, self._device)

    def scores(self, queries: Tensor, keys: Tensor, scale: float, rows: slice) -> Tensor:
        """Returns scale q k^T / ln 2, with -inf for keys after the query: [groups, a/g n, m].

        queries: [groups, a/g, n, d]. keys: [groups, s, d], of which the first m are read.
        """
        wide = self._wide_rows.copy(queries).flatten(1, 2)
        tile = self._first.of((*wide.shape[:2], rows.stop))
        scores = torch.bmm(wide, keys[:, : rows.stop].transpose(1, 2), out=tile)
        n = queries.shape[2]
        own = scores.mul_(scale / LN_2).unflatten(1, (-1, n))[..., rows.start :]
        own += self._later[:n, :n]
        return scores

    def weighted_rows(self, tile: Tensor, keys: Tensor) -> Tensor:
        """Returns tile [groups, a/g n, m] times keys [groups, m, d]: [groups, a/g n, d]."""
        result = self._narrow_rows.of((*tile.shape[:2], keys.shape[2]))
        return torch.bmm(tile, keys, out=result)


class _BackwardBlockMemory(_BlockMemory):
    """The memory of a backward."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        super().__init__(query, key)
        self.second = self.wide(self.shape.tile)
        self.wide_values, self.key_sums, self.value_sums, self._wide_product = (
            self.wide(self.shape.keys) for _ in range(4)
        )
        self._narrow_product = self.narrow(self.shape.keys)
        self.grad_rows = self.wide(self.shape.rows)
        self._factor_rows = self.narrow(self.shape.rows)

    def add_(self, total: Tensor, tile: Tensor, rows: Tensor) -> None:
        """Adds tile^T times rows to a float32 total [groups, m, d].

        tile: [groups, a/g n, m]. rows: [groups, a/g, n, d]. The product is in the dtype of the
        factors.
        """
        factor = self._factor_rows.copy(rows).flatten(1, 2)
        product = self._narrow_product.of(total.shape)
        torch.bmm(tile.transpose(1, 2), factor, out=product)
        # add_ with two dtypes would allocate such a copy each time
        total.add_(self._wide_product.copy(product))
