"""Attention over context-parallel ranks by an exchange of heads (Ulysses, arXiv 2309.14509).

    before, after    this rank's s/c tokens (parallel/sequence_spans.py) of all a/t heads
    between          all s tokens, in their order, of a/(c t) heads

An all-to-all brings each of query, key and value there, and one brings the output back. Any
attention of one rank runs between: with windows, documents or dropout, by any kernel. The numbers
of heads and of query groups must be divisible by c t.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import all_to_all
from megatron_lite.tensor_parallel.mappings import mapped


class HeadExchange(nn.Module):
    """Attention as that of CoreAttention, of this rank's tokens.

    attention: that of whole sequences. Keeps nothing but what `attention` keeps.
    """

    def __init__(self, attention: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.attention, self.group = attention, group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Any = None,
        skip_tail: bool = False,
    ) -> Tensor:
        whole = (mapped(one, self.group, to_heads, to_tokens) for one in (query, key, value))
        attended = self.attention(*whole, documents, skip_tail).unflatten(-1, (-1, value.shape[-1]))

        def unread(tensor: Tensor, group: ProcessGroup) -> Tensor:
            return tensor.new_empty(()).expand(*query.shape[:-1], value.shape[-1])

        back = unread if skip_tail else to_tokens
        return mapped(attended, self.group, back, to_heads).flatten(2)


def to_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """[s/c, b, heads, d] of this rank's tokens -> [s, b, heads/c, d] of this rank's heads."""
    ones = [1] * group.size()
    parts = tensor.unflatten(2, (len(ones), -1)).movedim(2, 0)  # [c, s/c, b, heads/c, d]
    received = all_to_all(parts, ones, ones, group)  # the tokens of each rank
    first, second = received.unflatten(1, (2, -1)).unbind(1)  # the two spans of each rank
    return torch.cat((first, second.flip(0))).flatten(0, 1)


def to_tokens(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The inverse of `to_heads`."""
    ones = [1] * group.size()
    first, second = tensor.unflatten(0, (2, len(ones), -1))  # spans [c, s/2c, b, heads/c, d]
    received = all_to_all(torch.stack((first, second.flip(0)), 1), ones, ones, group)
    return received.flatten(1, 2).movedim(0, 2).flatten(2, 3)  # the heads of each rank
