"""Brings tokens to the expert-parallel ranks that hold their experts, and the results back.

--moe-token-dispatcher-type:

    alltoall     Each row goes to the rank of its expert, and its result comes back. A rank sends
                 k T rows and receives as many as its experts are chosen for.
    allgather    Each rank gets the tokens of all ranks, and computes the rows of its own experts.
                 The partial sums of the tokens are reduce-scattered.

The numbers of rows are data. The host waits for them once in a forward, and once in a replay.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.model.experts import RowOrder, placed
from megatron_lite.parallel.collectives import all_reduce_, all_to_all
from megatron_lite.parallel.torch_internals import is_fake
from megatron_lite.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron_lite.tensor_parallel.rank_context import RankContext


class Dispatcher:
    """The way of the tokens of a layer to expert-parallel ranks.

    gathers: whether each rank computes with the tokens of all ranks.
    """

    def __init__(self, context: RankContext, num_experts: int) -> None:
        assert context.experts is not None and context.experts.ep_group is not None
        self._group, self._rank = context.experts.ep_group, context.experts.ep_rank
        self._size, self._num_experts = context.experts.ep_size, num_experts
        self._num_own = num_experts // self._size
        # Before their rows are sent, the tokens are gathered over the ranks that share an expert.
        self._tp_group = context.experts.tp_group if context.sequence_parallel else None
        self.gathers = context.experts.token_dispatcher == "allgather"

    def exchange(self, experts: Tensor) -> Tensor:
        """Returns how many rows each rank sends for each expert of this rank: [ranks, own] int64.

        experts: [T, k], the choice for this rank's tokens. Issues an all-to-all of E numbers, and
        before it an all-reduce over the experts' TP group.
        """
        counts = experts.flatten().new_zeros(self._num_experts)
        counts.scatter_add_(0, experts.flatten(), torch.ones_like(experts.flatten()))
        equal = [self._num_own] * self._size
        received = all_to_all(all_reduce_(counts, self._tp_group), equal, equal, self._group)
        return received.view(self._size, self._num_own)

    def order(self, experts: Tensor, received: Tensor | None) -> RowOrder:
        """Returns the order of the rows that this rank computes or sends.

        experts: [T, k]. received: what `exchange` returned.
        """
        if received is None:
            return self._of_own(gather_from_sequence_parallel_region(experts, self._group))
        order, ends = RowOrder.of(experts, self._num_experts)[:2]
        sent = ends.diff(prepend=ends.new_zeros(1)).view(self._size, -1).sum(1)
        numbers = torch.stack([sent, received.sum(1)])
        to_each, from_each = self._read(numbers, order.shape[0] // self._size)
        own = torch.arange(self._num_own, device=experts.device).repeat(self._size)
        of_rows = own.repeat_interleave(received.flatten(), output_size=sum(from_each))
        places = of_rows.argsort(stable=True)
        journey = Journey(self._group, to_each, from_each, places)
        return RowOrder(order, received.sum(0).cumsum(0).int(), journey)

    def gathered(self, tokens: Tensor) -> Tensor:
        """Returns the tokens of all ranks."""
        return gather_from_sequence_parallel_region(tokens, self._group)

    def scattered(self, partial_sums: Tensor, skip_tail: bool) -> Tensor:
        """Returns the sums of this rank's tokens."""
        return reduce_scatter_to_sequence_parallel_region(partial_sums, self._group, skip_tail)

    def _of_own(self, experts: Tensor) -> RowOrder:
        order, ends = RowOrder.of(experts, self._num_experts)[:2]
        first = self._rank * self._num_own
        bounds = torch.cat([ends.new_zeros(1), ends])[first : first + self._num_own + 1]
        ((start, stop),) = self._read(bounds[[0, -1]].unsqueeze(0), 0)
        if is_fake(order):
            start, stop = 0, order.shape[0] // self._size
        # a copy, so that the rows of other ranks are not kept
        return RowOrder(order[start:stop].clone(), bounds[1:] - start)

    def _read(self, numbers: Tensor, balanced: int) -> list[list[int]]:
        """Returns numbers of rows, for which the host waits. Fake ones are those of a balance."""
        if is_fake(numbers):
            return [[balanced] * numbers.shape[1]] * numbers.shape[0]
        lists: list[list[int]] = numbers.tolist()
        return lists


class Journey(NamedTuple):
    """The way of rows to the ranks of their experts and back.

    sent, received: the numbers of rows that each rank gets from this one, and gives to it.
    places: [received rows] int64, the received rows in the order of this rank's experts.
    """

    group: ProcessGroup
    sent: list[int]
    received: list[int]
    places: Tensor

    def there(self, rows: Tensor) -> Tensor:
        """Returns the rows of this rank's experts. Backward takes their gradients back."""
        moved: Tensor = _Moved.apply(rows, self.places, self, False, False)
        return moved

    def back(self, rows: Tensor, skip_tail: bool) -> Tensor:
        """Returns the results of the rows that this rank has sent.

        skip_tail: builds only the graph, for a replay whose output is never read.
        """
        moved: Tensor = _Moved.apply(rows, self.places, self, True, skip_tail)
        return moved


class _Moved(torch.autograd.Function):
    """Rows to the ranks of their experts, or back. Issues an all-to-all. Keeps the places."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, places: Tensor, journey: Journey, is_back: bool, skip: bool
    ) -> Tensor:
        ctx.save_for_backward(places)
        ctx.journey, ctx.is_back = journey._replace(places=places[:0]), is_back
        if skip:
            return rows.new_empty(()).expand(sum(journey.sent), *rows.shape[1:])
        return _move(rows, places, journey, is_back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return _move(grad, places, ctx.journey, not ctx.is_back), None, None, None, None


def _move(rows: Tensor, places: Tensor, journey: Journey, is_back: bool) -> Tensor:
    group, sent, received, _ = journey
    if is_back:
        return all_to_all(placed(rows, places, places.shape[0]), sent, received, group)
    return all_to_all(rows, received, sent, group)[places]
