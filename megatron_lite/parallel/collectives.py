"""Every collective of the project. A group of None is a group of one rank: nothing is sent and the input comes back.

Inputs need not be contiguous. Sums of bf16 run in bf16 and depend on the ring order, so gradients are reduced in fp32
(see optim/). Names ending in an underscore write into their argument; the others never do. Under a selective checkpoint
they are functional operators, whose results it may keep: see `results_may_be_kept`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

# torch 2.13 renamed the single-tensor forms; older releases know only the first names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_functional = torch.ops._c10d_functional


def results_may_be_kept() -> bool:
    """Whether torch's selective checkpoint watches what runs, or replays it with the results that it has kept.

    Of an in-place collective it would keep what the call returns, not what it writes, and gradients would be silently wrong.
    """
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode)) for mode in _get_current_dispatch_mode_stack())


def all_reduce_(tensor: Tensor, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduces contiguous `tensor` over the group in place and returns it. Moves 2(n-1)/n of its bytes per rank."""
    if group is not None:
        assert not results_may_be_kept(), "a selective checkpoint does not see what a collective writes in place: use all_reduce"
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def all_reduce(tensor: Tensor, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The reduction of `tensor` over the group as a new tensor (the tensor itself for a group of one)."""
    if group is None:
        return tensor
    if results_may_be_kept():
        return _waited(_functional.all_reduce(tensor.contiguous(), op.name.lower(), group.group_name))
    return all_reduce_(tensor.clone(memory_format=torch.contiguous_format), group, op)


class Started(NamedTuple):
    """A collective under way. Its operand, kept here, must not be touched before `wait`."""

    result: Tensor
    work: dist.Work | None
    operand: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, ready for this device's next kernels."""
        if self.work is not None:
            self.work.wait()
        return self.result


def start_all_reduce_(tensor: Tensor, group: ProcessGroup | None) -> Started:
    """Begins the sum of contiguous `tensor` over the group, in place."""
    return Started(tensor, None if group is None else dist.all_reduce(tensor, group=group, async_op=True))


def start_all_gather_first_dim(tensor: Tensor, group: ProcessGroup | None) -> Started:
    """Begins `all_gather_first_dim`."""
    if group is None:
        return Started(tensor, None)
    operand = tensor.contiguous()
    gathered = tensor.new_empty((tensor.shape[0] * group.size(), *tensor.shape[1:]))
    return Started(gathered, _all_gather(gathered, operand, group=group, async_op=True), operand)


def start_reduce_scatter_first_dim(tensor: Tensor, group: ProcessGroup | None) -> Started:
    """Begins `reduce_scatter_first_dim`."""
    if group is None:
        return Started(tensor, None)
    _check_divisible(tensor, group)
    operand = tensor.contiguous()
    scattered = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
    return Started(scattered, _reduce_scatter(scattered, operand, group=group, async_op=True), operand)


def start_reduce_scatter_own_part_(tensor: Tensor, group: ProcessGroup) -> Started:
    """Begins to sum [n * size] over the group. Rank i's part, [i n : (i + 1) n], becomes that of the sum, and is the result; of
    the other parts nothing can be said afterwards."""
    _check_divisible(tensor, group)
    own = tensor.view(group.size(), -1)[group.rank()]
    return Started(own, _reduce_scatter(own, tensor, group=group, async_op=True), tensor)


def start_all_gather_parts_(tensor: Tensor, group: ProcessGroup) -> Started:
    """Begins to fill [n * size] with every rank's part: what rank i holds at [i n : (i + 1) n]."""
    _check_divisible(tensor, group)
    own = tensor.view(group.size(), -1)[group.rank()]
    return Started(tensor, _all_gather(tensor, own, group=group, async_op=True), own)


def all_gather_first_dim(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """[n, ...] on each rank -> [n * size, ...], in rank order. Each rank receives (size - 1) shards."""
    if group is not None and results_may_be_kept():
        return _waited(_functional.all_gather_into_tensor(tensor.contiguous(), group.size(), group.group_name))
    return start_all_gather_first_dim(tensor, group).wait()


def reduce_scatter_first_dim(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """[n * size, ...] on each rank -> this rank's [n, ...] slice of the sum over ranks. ValueError where n is not whole."""
    if group is not None and results_may_be_kept():
        _check_divisible(tensor, group)
        return _waited(_functional.reduce_scatter_tensor(tensor.contiguous(), "sum", group.size(), group.group_name))
    return start_reduce_scatter_first_dim(tensor, group).wait()


def all_gather_bytes(data: bytes, group: ProcessGroup | None) -> list[bytes]:
    """The data of every rank, in rank order, over a group that serves CPUs (gloo). Sends the lengths, then the data, padded."""
    if group is None:
        return [data]
    lengths = all_gather_first_dim(torch.tensor([len(data)]), group).tolist()
    padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
    rows = all_gather_first_dim(padded, group).view(len(lengths), -1)
    return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]


def broadcast_(tensor: Tensor, group: ProcessGroup | None, *, group_source: int = 0) -> Tensor:
    """Overwrites `tensor` on every rank with that of the group's rank `group_source`."""
    if group is not None:
        dist.broadcast(tensor, src=dist.get_global_rank(group, group_source), group=group)
    return tensor


def _check_divisible(tensor: Tensor, group: ProcessGroup) -> None:
    if tensor.shape[0] % group.size():
        raise ValueError(f"reduce-scatter of {tuple(tensor.shape)}: dim 0 is not divisible by the group size {group.size()}")


def _waited(result: Tensor) -> Tensor:
    """The result of a functional collective, ready for this device's next kernels."""
    return _functional.wait_tensor(result)
