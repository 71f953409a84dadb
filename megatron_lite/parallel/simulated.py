"""One rank of a run of any size, in one process and without any other rank.

The rank joins torch's "fake" process group: each collective returns at once, and what it should
have received is undefined. Its tensors are fake ones, and its generators have no states. So shapes
and memory are those of a real rank, and values do not exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.rng import Access, RngStreams
from megatron_lite.parallel.state import ParallelState, parallel_state
from megatron_lite.parallel.torch_internals import (
    FakeTensorMode,
    fake_store,
    fake_work,
    has_kernel_for,
    schema_of,
)

TAKES_STORAGE = (
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
)


@contextmanager
def simulated_rank(
    config: ParallelConfig, fake: SimulatedTensors, *, rank: int, world_size: int, seed: int
) -> Iterator[ParallelState]:
    """Yields the state of global rank `rank` on a CPU, and destroys its groups on exit.

    fake: the mode under which the rank will run.
    The process must not be in any process group. Raises InputError if the world size is not a
    multiple of one model's ranks.
    """
    assert not dist.is_initialized(), "a simulated rank needs a process without process groups"
    if world_size > 1:
        dist.init_process_group("fake", store=fake_store()(), rank=rank, world_size=world_size)
    try:
        with parallel_state(
            replace(config, distributed_backend="gloo"),
            seed=seed,
            launch=Launch(launcher="simulated", rank=rank, world_size=world_size),
        ) as parallel:
            yield replace(parallel, rng=_FakeStreams(parallel.device, fake))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class SimulatedTensors(FakeTensorMode):
    """A FakeTensorMode that keeps no storage alive.

    torch's mode remembers the results of operators by their arguments. A storage is an argument of
    `Tensor.set_`, and the memory of the mode would hold it for ever.
    """

    cache_enabled: bool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not has_kernel_for(func.name(), "Meta"):
            return _finished(func, args)
        remembers = self.cache_enabled
        self.cache_enabled = remembers and func not in TAKES_STORAGE
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.cache_enabled = remembers


def _finished(func: Any, args: Sequence[Any]) -> Any:
    """Returns what a finished collective returns. torch 2.8 has no fakes of collectives."""
    work = fake_work().boxed()
    return work if len(schema_of(func).returns) == 1 else (args[0], work)


class _FakeStreams(RngStreams):
    """Streams whose states are fake tensors, since an operator under `fake` takes no other ones.

    They draw from no generator of the process and do not change one.
    """

    def __init__(self, device: torch.device, fake: SimulatedTensors) -> None:
        self._fake = fake
        super().__init__(device, seed=0)
        self.access = Access(self.state, lambda _: None)

    def state(self) -> Tensor:
        # A state is a tensor that no operator creates, and so is a converted one.
        return self._fake.from_tensor(torch.get_rng_state())

    def _seed(self, seed: int) -> None:
        pass
