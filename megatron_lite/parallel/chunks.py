"""Which tokens of a sequence each context-parallel rank holds: two of 2c chunks, one from each end.

    cp 2     chunk 0   chunk 1   chunk 2   chunk 3        a query reads the keys up to its own position: rank 0's two chunks
             rank 0    rank 1    rank 1    rank 0         read 1 + 4 chunks of keys, rank 1's 2 + 3: all ranks do the same work

(Megatron's and Llama 3's order, arXiv 2407.21783 sec. 3.3.2.) A rank's chunks stand one after the other in its tensors; under
sequence parallelism each tensor-parallel rank has 1/t of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """A rank's place among those that share each sequence. group: None for one rank.

    comm_type: how keys and values reach the other ranks, "p2p" or "allgather" (--cp-comm-type).
    """

    group: ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    comm_type: str = "p2p"

    def spans(self, num_tokens: int) -> tuple[slice, ...]:
        """The positions of this rank's `num_tokens` tokens."""
        return spans_of(self.size * num_tokens, rank=self.rank, size=self.size)

    def positions_by_rank(self, num_tokens: int, device: torch.device) -> Tensor:
        """[c, num_tokens]: the position of every token of every rank, int64."""
        places = torch.arange(self.size * num_tokens, device=device)
        return torch.stack([select(places, spans_of(self.size * num_tokens, rank=rank, size=self.size), 0)
                            for rank in range(self.size)])


def spans_of(seq_length: int, *, rank: int, size: int) -> tuple[slice, ...]:
    """The positions that one of `size` ranks holds, in the order of its tensors; 2c must divide seq_length unless c is 1."""
    if size == 1:
        return (slice(0, seq_length),)
    assert seq_length % (2 * size) == 0, (seq_length, size)
    length = seq_length // (2 * size)
    return tuple(slice(chunk * length, (chunk + 1) * length) for chunk in (rank, 2 * size - 1 - rank))


def part_of(spans: Sequence[slice], start: int, length: int) -> tuple[slice, ...]:
    """The positions of tokens [start, start + length) of those that the spans name one after the other."""
    parts = []
    for span in spans:
        first, stop = max(start, 0), min(start + length, span.stop - span.start)
        if first < stop:
            parts.append(slice(span.start + first, span.start + stop))
        start -= span.stop - span.start
    return tuple(parts)


def select(tensor: Tensor, spans: Sequence[slice], dim: int) -> Tensor:
    """A copy of the spans of `dim`, one after the other; contiguous."""
    return torch.cat([tensor.narrow(dim, span.start, span.stop - span.start) for span in spans], dim)
