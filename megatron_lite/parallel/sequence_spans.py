"""The tokens of a sequence that each context-parallel rank holds.

A sequence has 2c spans of equal length, and each rank holds two of them, one from each end.

    cp 2     span 0   span 1   span 2   span 3
             rank 0   rank 1   rank 1   rank 0

A query reads the keys up to its own position. Rank 0's two spans read 1 + 4 spans of keys, and
rank 1's spans read 2 + 3. All ranks therefore do the same work. The order is that of Megatron and
Llama 3 (arXiv 2407.21783 sec. 3.3.2). A rank's tensors hold its two spans one after the other.
Under sequence parallelism each tensor-parallel rank has 1/t of these tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def spans_of(seq_length: int, *, rank: int, size: int) -> tuple[slice, ...]:
    """Returns the positions that one of `size` ranks holds, in the order of its tensors.

    With more than one rank, 2 * size must divide seq_length.
    """
    if size == 1:
        return (slice(0, seq_length),)
    assert seq_length % (2 * size) == 0, (seq_length, size)
    length = seq_length // (2 * size)
    return tuple(
        slice(place * length, (place + 1) * length) for place in (rank, 2 * size - 1 - rank)
    )


def positions_by_rank(num_tokens: int, size: int, device: torch.device) -> Tensor:
    """Returns the position of every token of every rank, [size, num_tokens] int64."""
    places = torch.arange(size * num_tokens, device=device)
    spans = [spans_of(len(places), rank=rank, size=size) for rank in range(size)]
    return torch.stack([select(places, of_rank, 0) for of_rank in spans])


def part_of(spans: Sequence[slice], start: int, length: int) -> tuple[slice, ...]:
    """Returns the positions of tokens [start, start + length) of a rank.

    The rank's tokens are those of `spans`, one span after the other.
    """
    parts = []
    for span in spans:
        first, stop = max(start, 0), min(start + length, span.stop - span.start)
        if first < stop:
            parts.append(slice(span.start + first, span.start + stop))
        start -= span.stop - span.start
    return tuple(parts)


def select(tensor: Tensor, spans: Sequence[slice], dim: int) -> Tensor:
    """Returns a contiguous copy of the spans of `dim`, one after the other."""
    return torch.cat(
        [tensor.narrow(dim, span.start, span.stop - span.start) for span in spans], dim
    )
