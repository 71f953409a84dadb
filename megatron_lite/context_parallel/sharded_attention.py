"""Causal attention of a sequence sharded over context-parallel ranks, without an [s, s] matrix.

Each rank holds two spans of the sequence (parallel/sequence_spans.py).

    keys and values of      queries of this rank that read them
    this rank               all, each up to its own position: one causal kernel
    a rank before           all read the first span, none the second
    a rank after            the second span reads all, the first none

Each part of keys and values therefore costs half of a square of work. Parts are merged row by row.
With the log-sum-exps l1 and l2 of two parts,

    y = y1 + sigmoid(l2 - l1) (y2 - y1)        l = log(e^l1 + e^l2)

Ring Attention is 2310.01889. The form with an all-gather is Llama 3's, 2407.21783 sec. 3.3.2.

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

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import (
    Started,
    reduce_scatter_first_dim,
    results_may_be_kept,
    start_all_gather_first_dim,
    start_shift,
)
from megatron_lite.parallel.compiled import Tensors, at_least_float32
from megatron_lite.parallel.torch_internals import group_of_name
from megatron_lite.parallel.weight_gradient import in_autocast_dtype

from .attention_kernels import heads_first, heads_last
from .fused_attention import attend, attend_backward, attention


def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: ProcessGroup, comm_type: str, scale: float
) -> Tensor:
    """Returns the attention output [s/c, b, a/t, d] of this rank's queries.

    query: [s/c, b, a/t, d]. key, value: [s/c, b, g/t, d]; the heads of value may be smaller, and
    travel padded. comm_type: a name of EXCHANGES.
    Keeps its inputs, its output and one float32 (float64) per row. The merged output and the
    query's gradient are summed in float32 (float64). The gradients of keys and values are summed in
    their own dtype, with one addition per rank. Issues the collectives of the table on the group.
    """
    query, key, value = in_autocast_dtype(query, key, value)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Iterable[Tensor]:
        if results_may_be_kept():
            # As one operator: the mode keeps the result of all parts, and the replay sends nothing.
            operator = torch.ops.megatron_lite.context_parallel_attention
            return operator(query, key, value, group.group_name, comm_type, scale)
        return _attend(query, key, value, group, comm_type, scale)

    def backward(
        grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor
    ) -> Tensors:
        own, (parts, total) = torch.stack((key, value)), EXCHANGES[comm_type]
        grad_query = torch.zeros_like(query, dtype=at_least_float32(query.dtype))

        def gradients() -> Iterator[PartGradient]:
            # The parts arrive again, as in forward. Each kernel gets the output and lse of all
            # keys, so the sum of the parts' gradients is the whole gradient.
            for source, keys_values in parts(own, group):
                queries, keys, causal = _reading(group.rank(), source, query.shape[0])
                grad, own_query, attended, part_key, part_value = map(
                    heads_first,
                    (grad_output[queries], query[queries], output[queries], *keys_values[:, keys]),
                )
                operands = grad, own_query, part_key, part_value, attended, lse[:, :, queries]
                grads = attend_backward(*operands, causal=causal, scale=scale)
                of_query, of_key, of_value = map(heads_last, grads)
                grad_query[queries] += of_query
                yield source, keys, of_key, of_value

        grad_keys_values = total(own, group, gradients())
        return grad_query.to(query.dtype), *grad_keys_values.unbind()

    return attention(query, key, value, forward, backward)


def _reading(rank: int, source: int, num_tokens: int) -> tuple[slice, slice, bool]:
    """Returns the queries of this rank and the keys of a part that they read, as slices of their
    tensors, and whether each query reads the keys only up to its own position."""
    every = slice(0, num_tokens)
    first = slice(0, num_tokens // 2)
    second = slice(num_tokens // 2, num_tokens)
    if source == rank:
        return every, every, True
    return (every, first, False) if source < rank else (second, every, False)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup, comm_type: str, scale: float
) -> Tensors:
    """Returns the output [s/c, b, a, d] and the log-sum-exp of each row, [b, a, s/c]."""
    totals: Tensors = ()
    parts, _ = EXCHANGES[comm_type]
    for source, keys_values in parts(torch.stack((key, value)), group):
        queries, keys, causal = _reading(group.rank(), source, query.shape[0])
        own_query, part_key, part_value = map(heads_first, (query[queries], *keys_values[:, keys]))
        found, found_lse = attend(own_query, part_key, part_value, causal=causal, scale=scale)
        # The first part is this rank's own, which all queries read. So `totals` have all rows, and
        # the other parts are merged into some of them.
        if not totals:
            totals = found.to(found_lse.dtype), found_lse
            continue
        output, lse = (one[:, :, queries] for one in totals)
        # The outputs come first: their weights need the lse before it is overwritten.
        output.lerp_(found.to(output.dtype), (found_lse - lse).sigmoid().unsqueeze(-1))
        torch.logaddexp(lse, found_lse, out=lse)
    output, lse = totals
    return heads_last(output.to(query.dtype)), lse.contiguous()


# The rank of a part, the tokens that queries of this rank read, and the gradients of their keys and
# of their values, [m, b, g, d] each.
PartGradient = tuple[int, slice, Tensor, Tensor]


def around_the_ring(own: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yields all parts as they arrive around the ring.

    `own` must not be written to before all parts have arrived.
    """
    rank, size = group.rank(), group.size()
    current = own
    # Each part is sent on before it is yielded, so the transfer runs beside the caller's work.
    for step in range(size):
        onwards = start_shift(current, group) if step < size - 1 else None
        yield (rank - step) % size, current
        current = own if onwards is None else onwards.wait()


def ring_sum(own: Tensor, group: ProcessGroup, gradients: Iterable[PartGradient]) -> Tensor:
    """Returns a sum that travels around the ring, in the tensors' dtype like a reduce-scatter.

    The running sum of a part follows the part by one step: each rank receives it, adds its own
    gradients and sends it on. After the last rank the sum arrives at the part's owner.
    own: this rank's part, [2, n, b, g, d], as the result.
    """
    travelling: Started | None = None
    for _, tokens, key, value in gradients:
        total = torch.zeros_like(own) if travelling is None else travelling.wait()
        total[0, tokens] += key
        total[1, tokens] += value
        travelling = start_shift(total, group)
    assert travelling is not None
    return travelling.wait()


def gathered(own: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yields all parts from one all-gather, which runs beside the work on this rank's own part."""
    rank, size = group.rank(), group.size()
    gather = start_all_gather_first_dim(own, group)
    yield rank, own
    whole = gather.wait().view(size, *own.shape)
    for step in range(1, size):
        yield (rank - step) % size, whole[(rank - step) % size]


def scattered_sum(own: Tensor, group: ProcessGroup, gradients: Iterable[PartGradient]) -> Tensor:
    """Returns the sum by one reduce-scatter of the gradients of all c parts."""
    whole = own.new_zeros((group.size(), *own.shape))
    for source, tokens, key, value in gradients:
        # Each part comes once, so nothing is added. Tokens that no query here reads stay 0.
        whole[source, 0, tokens] = key
        whole[source, 1, tokens] = value
    return reduce_scatter_first_dim(whole.flatten(0, 1), group)


# The two functions of each way to exchange parts. The first one yields all parts, each with its
# rank: this rank's own first, and then those of the ranks before it. The second one returns the sum
# of the gradients of this rank's part over all ranks, from this rank's gradients of all parts. They
# come in the order of the parts, once each.
EXCHANGES = {"p2p": (around_the_ring, ring_sum), "allgather": (gathered, scattered_sum)}


# As one operator, a selective checkpoint can keep the result like that of a kernel. The replay then
# issues no collective.
_OPERATORS = torch.library.Library("megatron_lite", "DEF")
_OPERATORS.define(
    "context_parallel_attention(Tensor query, Tensor key, Tensor value, str group, str comm_type, "
    "float scale) -> (Tensor, Tensor)"
)
_OPERATORS.impl(
    "context_parallel_attention",
    lambda query, key, value, group, *way: _attend(query, key, value, group_of_name(group), *way),
    "CompositeExplicitAutograd",
)
