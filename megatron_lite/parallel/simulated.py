"""One rank of a run of any size, in one process and without any other rank.

The rank joins torch's "fake" process group: each collective returns at once, and what it should
have received is undefined. So shapes and memory are those of a real rank, and values are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist

from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.state import ParallelState, parallel_state


@contextmanager
def simulated_rank(
    config: ParallelConfig, *, rank: int, world_size: int, seed: int
) -> Iterator[ParallelState]:
    """Yields the state of global rank `rank` on a CPU, and destroys its groups on exit.

    The process must not be in any process group. Raises InputError if the world size is not a
    multiple of one model's ranks.
    """
    # Imported here because the module belongs to torch's own tests, and few runs need it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a simulated rank needs a process without process groups"
    if world_size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with parallel_state(
            replace(config, distributed_backend="gloo"),
            seed=seed,
            launch=Launch(launcher="simulated", rank=rank, world_size=world_size),
        ) as parallel:
            yield parallel
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
