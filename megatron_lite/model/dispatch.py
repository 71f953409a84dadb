"""The order of tokens by their experts, and exchanges of all ranks with all: of tokens with the
ranks that hold their experts, and of heads.

--moe-token-dispatcher-type:

    alltoall     Each row goes to the rank of its expert, and its result comes back. A rank sends
                 k T rows, less those that are dropped, and receives as many as its experts are
                 chosen for.
    allgather    Each rank gets the tokens of all ranks, and computes the rows of its own experts.
                 The partial sums of the tokens are reduce-scattered.

The numbers of rows are data. The host waits for them once in a forward, and once in a replay.

`HeadExchange` is attention over context-parallel ranks (Ulysses, arXiv 2309.14509):

    before, after    this rank's s/c tokens (parallel/sequence_spans.py) of all a/t heads
    between          all s tokens, in their order, of a/(c t) heads

An all-to-all brings each of query, key and value there, and one brings the output back. Any
attention of one rank runs between: with windows, documents or dropout, by any kernel. The numbers
of heads and of query groups must be divisible by c t.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.collectives import all_reduce_, all_to_all
from megatron_lite.parallel.compiled import Pair, Tensors, applied
from megatron_lite.parallel.torch_internals import is_fake
from megatron_lite.tensor_parallel.mappings import gather_from_sequence_parallel_region, mapped
from megatron_lite.tensor_parallel.rank_context import RankContext


class Dispatcher:
    """The way of the tokens of a layer to their experts.

    tp_group: the ranks that share an expert.
    gathered_over: the ranks whose tokens each of them gathers, under "allgather".
    asks: whether ranks must tell each other how many rows they send.
    """

    def __init__(self, context: RankContext, config: ModelConfig) -> None:
        assert config.num_experts is not None
        self._config, self._place = config, context.experts or context
        self._num_experts = config.num_experts
        self._num_own = config.num_experts // self._place.ep_size
        self.tp_group, group = self._place.tp_group, self._place.ep_group
        self._split_over = self.tp_group if context.sequence_parallel else None
        self.gathered_over = group if self._place.token_dispatcher == "allgather" else None
        is_known = self.gathered_over or config.moe_pad_expert_input_to_capacity
        self.asks = group is not None and not is_known

    def exchange(self, experts: Tensor) -> Tensor:
        """Returns how many rows each rank sends for each expert of this rank: [ranks, own] int64.

        experts: [T, k], the choice for this rank's tokens. Issues an all-to-all of E numbers, and
        before it an all-reduce over the ranks that share an expert, which gather their tokens.
        """
        counts = experts.new_zeros(2 * self._num_experts)  # the second half is dropped
        counts.scatter_add_(0, experts.flatten(), torch.ones_like(experts.flatten()))
        counts = all_reduce_(counts[: self._num_experts].clone(), self.tp_group)
        equal, group = [self._num_own] * self._place.ep_size, self._place.ep_group
        assert group is not None
        return all_to_all(counts, equal, equal, group).view(len(equal), -1)

    @torch.no_grad()
    def order(self, chosen: Tensor, received: Tensor | None) -> RowOrder:
        """Returns the order of the rows that this rank computes or sends.

        chosen: [T, k], the choice for this rank's tokens. received: what `exchange` returned, if
            ranks ask.
        """
        place, num_own, experts = self._place, self._num_own, chosen
        for over in (self._split_over, self.gathered_over):
            experts = gather_from_sequence_parallel_region(experts, over)
        num_routers = len(experts) // len(chosen)
        found = RowOrder.of(experts, self._config, num_routers)
        if place.ep_group is None:
            return found
        order, ends, is_padded, _ = found
        fullest = num_routers * self._config.chosen_rows(
            len(experts) // num_routers, place.imbalance
        )
        bounds = F.pad(ends, (1, 0))
        if self.gathered_over is not None:
            own = bounds[place.ep_rank * num_own :][: num_own + 1]
            start, stop = numbers(own[[0, -1]], [0, fullest // place.ep_size])
            # a copy, so that the rows of other ranks are not kept
            return RowOrder(order[start:stop].clone(), own[1:] - start, is_padded)
        sent = bounds.diff().view(place.ep_size, -1)
        if received is None:  # every rank sends each expert as many rows as this one
            received = sent[:1].expand_as(sent)
        both = torch.cat([sent.sum(1), received.sum(1)])
        rows = numbers(both, [*_parts(len(order), place.ep_size), *_parts(fullest, place.ep_size)])
        sizes = rows[: place.ep_size], rows[place.ep_size :]
        of_rows = torch.arange(received.numel(), device=experts.device) % self._num_own
        of_rows = of_rows.repeat_interleave(received.flatten(), output_size=sum(sizes[1]))
        journey = Journey(place.ep_group, *sizes, of_rows.argsort(stable=True))
        return RowOrder(order, received.sum(0).cumsum(0).int(), is_padded, journey)


def _parts(total: int, count: int) -> list[int]:
    return [total * (part + 1) // count - total * part // count for part in range(count)]


class Journey(NamedTuple):
    """The way of rows to the ranks of their experts and back.

    sent, received: the numbers of rows that each rank gets from this one, and gives to it.
    places: [received rows] int64, the received rows in the order of this rank's experts.
    """

    group: ProcessGroup
    sent: list[int]
    received: list[int]
    places: Tensor

    def moved(self, rows: Tensor, *, is_back: bool = False, skip_tail: bool = False) -> Tensor:
        """Returns the rows of this rank's experts; if `is_back`, the results of those that this
        rank has sent. Backward moves the gradients the other way.

        skip_tail: builds only the graph, for a replay whose output is never read.
        """
        # The places are among the saved tensors, so that hooks see them.
        group, sent, received, _ = self

        def move(rows: Tensor, places: Tensor, is_back: bool) -> Tensor:
            if is_back:
                return all_to_all(placed(rows, places, places.shape[0]), sent, received, group)
            return all_to_all(rows, received, sent, group)[places]

        forward, backward = (partial(move, is_back=back) for back in (is_back, not is_back))
        unread = (sum(sent), *rows.shape[1:]) if skip_tail else None
        return applied(Pair(forward, backward, slice(1, 2)), rows, self.places, unread=unread)


class RowOrder(NamedTuple):
    """The rows of tokens, in the order of the experts.

    order: [n] int64, the place of each row in the flattened choice [T, k], or -1 for padding. Rows
        of one expert keep the order of their tokens.
    ends: [experts of this rank] int32, the number of rows of its experts up to and including each.
    is_padded: whether there may be padding.
    journey: takes the rows to the ranks of their experts; None: they are computed here.
    """

    order: Tensor
    ends: Tensor
    is_padded: bool = False
    journey: Journey | None = None

    @classmethod
    def of(cls, experts: Tensor, config: ModelConfig, num_routers: int) -> RowOrder:
        """Returns the order for the choice of experts [T, k], which so many routers made.

        If tokens are dropped, the host waits for the number of rows.
        """
        chosen, order = experts.flatten().sort(stable=True)  # those that are dropped come last
        bounds = torch.arange(1, (config.num_experts or 0) + 1, device=chosen.device)
        ends = torch.searchsorted(chosen, bounds)
        num_tokens = len(experts) // num_routers
        capacity = config.capacity(num_tokens)
        if capacity is None:
            return cls(order, ends.int())
        if not config.moe_pad_expert_input_to_capacity:
            balanced = config.chosen_rows(num_tokens) * num_routers
            (num_rows,) = numbers(ends[-1:], [balanced])
            return cls(order[:num_rows], ends.int())
        each = capacity * num_routers
        places = F.pad(ends, (1, 0))[:-1, None] + bounds.new_ones(each).cumsum(0) - 1
        found = order[places.clamp(max=len(order) - 1)].masked_fill(places >= ends[:, None], -1)
        return cls(found.flatten(), (bounds * each).int(), True)

    def sent(self, tokens: Tensor, weights: Tensor) -> Tensors:
        """tokens [T, h], weights [T, k] -> rows [n, h], row weights [n]. Keeps the order."""
        shape, is_padded = weights.shape, self.is_padded

        def forward(tokens: Tensor, weights: Tensor, order: Tensor) -> Tensors:
            row_weights = weights.flatten()[order]
            if is_padded:
                row_weights.masked_fill_(order < 0, 0.0)
            return tokens[order // shape[1]], row_weights

        def backward(grad_rows: Tensor, grad_weights: Tensor, order: Tensor) -> Tensors:
            grad_tokens, grad_weights = (
                placed(grad, order, shape.numel(), is_padded) for grad in (grad_rows, grad_weights)
            )
            return grad_tokens.unflatten(0, shape).sum(1), grad_weights.view(shape)

        pair = Pair(forward, backward, slice(2, 3), outputs=2)
        return applied(pair, tokens, weights, self.order)

    def summed(self, rows: Tensor, shape: torch.Size, skip_tail: bool) -> Tensor:
        """rows [n, h] -> [T, h], the sum of the rows of each token. shape: [T, k]. Keeps the order.

        skip_tail: builds only the graph, for a replay whose output is never read.
        """
        is_padded = self.is_padded

        def forward(rows: Tensor, order: Tensor) -> Tensor:
            return placed(rows, order, shape.numel(), is_padded).unflatten(0, shape).sum(1)

        pair = Pair(forward, lambda grad, order: grad[order // shape[1]], slice(1, 2))
        unread = (shape[0], rows.shape[1]) if skip_tail else None
        return applied(pair, rows, self.order, unread=unread)


def numbers(of: Tensor, balanced: list[int]) -> list[int]:
    """Returns numbers of rows, for which the host waits. Fake ones are those of a balance."""
    return balanced if is_fake(of) else of.tolist()


def placed(rows: Tensor, order: Tensor, num_places: int, is_padded: bool = False) -> Tensor:
    """Returns each row at its place in `order`: [n, ...] -> [num_places, ...], elsewhere zeros."""
    if is_padded:  # padding goes to one more place
        found = rows.new_zeros((num_places + 1, *rows.shape[1:]))
        return found.index_copy_(0, order % (num_places + 1), rows)[:num_places]
    make = rows.new_empty if order.shape[0] == num_places else rows.new_zeros
    return make((num_places, *rows.shape[1:])).index_copy_(0, order, rows)


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
        unread = (*query.shape[:-1], value.shape[-1]) if skip_tail else None
        return mapped(attended, self.group, to_tokens, to_heads, unread).flatten(2)


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
