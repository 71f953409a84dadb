"""Every collective of the project.

A group of None is a group of one rank: the function sends nothing and returns its input. Inputs
need not be contiguous unless a docstring says so. Sums of bf16 run in bf16 and depend on the ring
order, so gradients are reduced in float32 (see optim/). Functions whose names end in an underscore
write into their argument; the others never do. Under a selective checkpoint the collectives are
functional operators, whose results the checkpoint may keep: see `results_may_be_kept`.

Over gloo an all-gather and a reduce-scatter copy the whole tensor once, and an all-reduce and a
broadcast copy nothing (description/sizes.py counts the copies).
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from megatron_lite.config.checks import parse_json

from .torch_internals import (
    CachedMode,
    CachingMode,
    KeepsResults,
    disable_current_modes,
    dispatch_modes,
    num_dispatch_modes,
)

# The time that a thread waits for other ranks, and the names of parts for a timer.
#
# Two modules wait for a collective or a message: collectives.py and pipeline/executor.py. Each of
# their waits is inside `WAITING`. FSDP2 sends through collectives.py too (fsdp.py). A thread
# outside `timed_waiting` times nothing and reads no clock. `--log-straggler` reads the times
# (supervision/slow_rank.py), and the measurement of a peak waits for gloo.


Group = ProcessGroup | None  # None: a group of one rank

GLOO_THREAD, THREADS = "pt_gloo_runloop", Path("/proc/self/task")
LOOK_AGAIN_S = 0.0002
# The kernel may leave a thread waiting for a processor that long on a busy machine.
GIVE_UP_AFTER_S = 60.0

# Returns a context manager that times the block under a name of training/profiler.py.
Timed = Callable[[str], AbstractContextManager[object]]
not_timed = nullcontext  # a context that does nothing


class _Waiting(threading.local):
    """A stopwatch for each thread, used as a context manager around a wait.

    The waits of a thread must not nest. Each thread has its own values, since other threads wait
    at the same time (a pipeline's sends, a save).

    is_timed: whether the thread's waits are timed.
    seconds: the sum of the thread's waits so far.
    frees: whether each wait goes on until gloo has let go of its tensors.
    """

    is_timed = False
    seconds = 0.0
    frees = False
    _start = 0.0

    def __enter__(self) -> None:
        if self.is_timed:
            self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self.is_timed:
            self.seconds += time.perf_counter() - self._start
        if self.frees:
            give_up = time.monotonic() + GIVE_UP_AFTER_S
            while _gloo_runs() and time.monotonic() < give_up:
                time.sleep(LOOK_AGAIN_S)


WAITING = _Waiting()


@contextmanager
def _waiting(name: str) -> Iterator[None]:
    setattr(WAITING, name, True)
    try:
        yield
    finally:
        setattr(WAITING, name, False)


# Times this thread's waits inside the block: they are added to `WAITING.seconds`.
timed_waiting = partial(_waiting, "is_timed")
# Makes this thread wait after each collective until gloo's threads let go of its tensors.
#
# A thread of gloo holds them until a little after the result is there, and on a busy machine for
# longer than the next operators take. Once it has let go of them, it sleeps. Without the wait such
# a thread may free a tensor, which torch's profiler does not see.
gloo_has_freed = partial(_waiting, "frees")


def _gloo_runs() -> bool:
    """Returns whether a thread of gloo has work to do, be it that it waits for a processor."""
    for thread in THREADS.glob("*"):
        try:
            name, state = (thread / "stat").read_text().partition("(")[2].rpartition(")")[::2]
        except OSError:  # the thread has ended
            continue
        if name == GLOO_THREAD and state.split()[0] != "S":
            return True
    return False


# torch 2.13 renamed the single-tensor forms; older releases have only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_functional = torch.ops._c10d_functional
KEEPING = KeepsResults, CachingMode, CachedMode


def results_may_be_kept() -> bool:
    """Returns whether an active dispatch mode may keep the results of operators.

    Such a mode is a `KeepsResults`, or a mode of torch's selective checkpoint. It keeps the tensor
    that a call returns. An in-place collective writes its result elsewhere, so the replay would
    read wrong values and the gradients would be silently wrong.
    """
    return num_dispatch_modes() > 0 and any(isinstance(one, KEEPING) for one in dispatch_modes())


@contextmanager
def results_not_kept() -> Iterator[None]:
    """Hides the block from dispatch modes that may keep results; all others see it."""
    modes = dispatch_modes()
    with disable_current_modes(), ExitStack() as around:
        for mode in modes:
            if not isinstance(mode, KEEPING):
                around.enter_context(mode)
        yield


def all_reduce_(
    tensor: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduces contiguous `tensor` over the group in place and returns it.

    Each of the n ranks moves 2(n-1)/n of the tensor's bytes.
    """
    if group is None:
        return tensor
    assert not results_may_be_kept(), (
        "a selective checkpoint does not see what a collective writes in place: use all_reduce"
    )
    return start_all_reduce_(tensor, group, op).wait()


def all_reduce(
    tensor: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Returns the reduction of `tensor` over the group as a new tensor.

    For a group of one rank it returns the tensor itself.
    """
    if group is None:
        return tensor
    if results_may_be_kept():
        return _kept(_functional.all_reduce, tensor, group, op.name.lower())
    return all_reduce_(tensor.clone(memory_format=torch.contiguous_format), group, op)


class Started(NamedTuple):
    """A collective under way. `operand` stays alive here and must not be touched before `wait`."""

    result: Tensor
    works: tuple[dist.Work, ...] = ()
    operand: Tensor | None = None

    def wait(self) -> Tensor:
        """Returns the result, which this device's next kernels may read."""
        if self.works:
            with WAITING:
                for work in self.works:
                    work.wait()
        return self.result


def start_all_reduce_(
    tensor: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Started:
    """Begins `all_reduce_`."""
    if group is None:
        return Started(tensor)
    return Started(tensor, (dist.all_reduce(tensor, op=op, group=group, async_op=True),))


def start_all_gather_into_(gathered: Tensor, own: Tensor, group: ProcessGroup) -> Started:
    """Begins to fill `gathered` [n * size, ...] with every rank's `own` [n, ...], in rank order.

    Both are contiguous. `own` may be this rank's part of `gathered`.
    """
    return Started(gathered, (_all_gather(gathered, own, group=group, async_op=True),), own)


def start_reduce_scatter_into_(own: Tensor, tensor: Tensor, group: ProcessGroup) -> Started:
    """Begins to fill `own` [n, ...] with this rank's part of the sum of `tensor` [n * size, ...].

    Both are contiguous. If `own` is this rank's part of `tensor`, the other elements of `tensor`
    are undefined afterwards; else `tensor` stays unchanged.
    """
    return Started(own, (_reduce_scatter(own, tensor, group=group, async_op=True),), tensor)


def start_all_gather_first_dim(tensor: Tensor, group: Group) -> Started:
    """Begins `all_gather_first_dim`."""
    if group is None:
        return Started(tensor)
    gathered = tensor.new_empty((tensor.shape[0] * group.size(), *tensor.shape[1:]))
    return start_all_gather_into_(gathered, tensor.contiguous(), group)


def start_reduce_scatter_first_dim(tensor: Tensor, group: Group) -> Started:
    """Begins `reduce_scatter_first_dim`."""
    if group is None:
        return Started(tensor)
    own = tensor.new_empty((_rows_of_each(tensor, group), *tensor.shape[1:]))
    return start_reduce_scatter_into_(own, tensor.contiguous(), group)


def start_shift(tensor: Tensor, group: ProcessGroup) -> Started:
    """Begins to send `tensor` around the ring of a group's ranks, each to the next rank.

    The result is the tensor of the rank before. `tensor` must be contiguous, and of one shape on
    all ranks. Several shifts under way arrive in the order in which they began. That order must be
    the same on all ranks.
    """
    rank, size = group.rank(), group.size()
    received = torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [
            P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size),
            P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
    )
    return Started(received, tuple(works), tensor)


def all_gather_first_dim(tensor: Tensor, group: Group) -> Tensor:
    """Gathers [n, ...] of each rank into [n * size, ...], in rank order.

    Each rank receives (size - 1) shards.
    """
    if group is not None and results_may_be_kept():
        return _kept(_functional.all_gather_into_tensor, tensor, group, group.size())
    return start_all_gather_first_dim(tensor, group).wait()


def reduce_scatter_first_dim(tensor: Tensor, group: Group) -> Tensor:
    """Sums [n * size, ...] over the ranks and returns this rank's [n, ...] slice of the sum.

    Raises ValueError if dim 0 is not divisible by the group's size.
    """
    if group is not None and results_may_be_kept():
        _rows_of_each(tensor, group)
        return _kept(_functional.reduce_scatter_tensor, tensor, group, "sum", group.size())
    return start_reduce_scatter_first_dim(tensor, group).wait()


def all_to_all(tensor: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    """Sends sent[i] rows of [n, ...] to each rank i, and returns the received[i] rows of each.

    The rows lie in the order of the ranks, before and after.
    """
    if results_may_be_kept():
        return _kept(_functional.all_to_all_single, tensor, group, received, sent)
    tensor = tensor.contiguous()
    result = tensor.new_empty((sum(received), *tensor.shape[1:]))
    work = dist.all_to_all_single(result, tensor, received, sent, group=group, async_op=True)
    return Started(result, (work,), tensor).wait()


def gather_values(value: Any, group: Group) -> list[Any]:
    """Returns the value (of JSON) of every rank, in rank order.

    The group must have a CPU backend (gloo). Issues two all-gathers: one of the lengths, and one of
    the texts, padded to the greatest length. The ranks wait for each other, so it does not belong
    in a step.
    """
    if group is None:
        return [value]
    data = json.dumps(value).encode()
    lengths = all_gather_first_dim(torch.tensor([len(data)]), group).tolist()
    padded = bytearray(data.ljust(max(lengths), b"\0"))
    gathered = all_gather_first_dim(torch.frombuffer(padded, dtype=torch.uint8), group)
    rows = gathered.view(len(lengths), -1).numpy()
    texts = [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
    return [*map(parse_json, texts)]


def broadcast_(tensor: Tensor, group: Group) -> Tensor:
    """Overwrites `tensor` on every rank with the tensor of the group's first rank."""
    if group is not None:
        source = dist.get_global_rank(group, 0)
        work = dist.broadcast(tensor, src=source, group=group, async_op=True)
        Started(tensor, (work,)).wait()
    return tensor


def _rows_of_each(tensor: Tensor, group: ProcessGroup) -> int:
    if tensor.shape[0] % group.size():
        raise ValueError(
            f"reduce-scatter of {tuple(tensor.shape)}: dim 0 is not divisible by the group "
            f"size {group.size()}"
        )
    return int(tensor.shape[0] // group.size())


def _kept(operator: Any, tensor: Tensor, group: ProcessGroup, *settings: object) -> Tensor:
    """Returns the result of a functional collective; this device's next kernels may read it."""
    with WAITING:
        return _functional.wait_tensor(operator(tensor.contiguous(), *settings, group.group_name))


def odd_ones_out(hashes: Tensor, group: ProcessGroup) -> list[int]:
    """Returns the indices of this rank's hashes that at most half of the group holds.

    Issues one all-gather, and waits for the device.
    """
    size = group.size()
    gathered = all_gather_first_dim(hashes, group).view(size, -1)
    agreeing = (gathered == hashes).sum(0)
    return [number for number, count in enumerate(agreeing.tolist()) if 2 * count <= size]
