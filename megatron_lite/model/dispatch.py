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
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.model.experts import RowOrder, placed
from megatron_lite.parallel.collectives import all_reduce_, all_to_all
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import is_fake
from megatron_lite.tensor_parallel.mappings import gather_from_sequence_parallel_region


class Dispatcher:
    """The way of the tokens of a layer to expert-parallel ranks.

    gathered_over: the ranks whose tokens each of them gathers, under "allgather".
    """

    def __init__(self, experts: ParallelState, num_experts: int) -> None:
        assert experts.ep_group is not None
        self._place, self._group = experts, experts.ep_group
        self._num_experts, self._num_own = num_experts, num_experts // experts.ep_size
        self.gathered_over = self._group if experts.token_dispatcher == "allgather" else None

    def exchange(self, experts: Tensor) -> Tensor:
        """Returns how many rows each rank sends for each expert of this rank: [ranks, own] int64.

        experts: [T, k], the choice for this rank's tokens. Issues an all-to-all of E numbers, and
        before it an all-reduce over the ranks that share an expert, which gather their tokens.
        """
        counts = experts.new_zeros(self._num_experts)
        counts.scatter_add_(0, experts.flatten(), torch.ones_like(experts.flatten()))
        counts = all_reduce_(counts, self._place.tp_group)
        equal = [self._num_own] * self._place.ep_size
        return all_to_all(counts, equal, equal, self._group).view(len(equal), -1)

    def order(self, experts: Tensor, received: Tensor | None) -> RowOrder:
        """Returns the order of the rows that this rank computes or sends.

        experts: [T, k]. received: what `exchange` returned; None if tokens are gathered.
        """
        place = self._place
        experts = gather_from_sequence_parallel_region(experts, self.gathered_over)
        order, ends = RowOrder.of(experts, self._num_experts)[:2]
        balanced = order.shape[0] // place.ep_size
        bounds = F.pad(ends, (1, 0))
        if received is None:
            own = bounds[place.ep_rank * self._num_own :][: self._num_own + 1]
            start, stop = _numbers(own[[0, -1]], [0, balanced])
            # a copy, so that the rows of other ranks are not kept
            return RowOrder(order[start:stop].clone(), own[1:] - start)
        sent = bounds.diff().view(place.ep_size, -1).sum(1)
        numbers = _numbers(torch.cat([sent, received.sum(1)]), [balanced] * (2 * place.ep_size))
        sizes = numbers[: place.ep_size], numbers[place.ep_size :]
        of_rows = torch.arange(received.numel(), device=experts.device) % self._num_own
        of_rows = of_rows.repeat_interleave(received.flatten(), output_size=sum(sizes[1]))
        journey = Journey(self._group, *sizes, of_rows.argsort(stable=True))
        return RowOrder(order, received.sum(0).cumsum(0).int(), journey)


def _numbers(numbers: Tensor, balanced: list[int]) -> list[int]:
    """Returns numbers of rows, for which the host waits. Fake ones are those of a balance."""
    return balanced if is_fake(numbers) else numbers.tolist()


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
