"""The processes of a run as one frozen value: a (dp, tp) mesh, its groups, this rank's place, device and RNG streams.

    world of 4, --tensor-model-parallel-size 2        tp: 0 1      ranks 0 and 1 hold the shards of one model,
                                                  dp: 0   0 1      ranks 0 and 2 hold the same shard and
                                                      1   2 3      average their gradients
A group of one rank is None, and no collective is issued for it. Nothing here is global: hand the state down.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.launch import Launch, read_launch
from megatron_lite.parallel.rng import RngStreams

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ParallelState:
    """This rank's place in the mesh. `mesh`, `tp_group` and `dp_group` are None where they would hold one rank."""

    device: torch.device
    rng: RngStreams
    mesh: DeviceMesh | None = None
    tp_group: ProcessGroup | None = None
    dp_group: ProcessGroup | None = None
    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def rank(self) -> int:
        """Global rank: data-parallel major, so that a TP group's ranks are neighbours (one node)."""
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """All ranks of the run."""
        return self.dp_size * self.tp_size

    @property
    def world_group(self) -> ProcessGroup | None:
        """The group of all ranks, None for one."""
        return None if self.mesh is None else dist.group.WORLD

    def all_agree(self, yes: bool) -> bool:
        """Whether every rank says yes. One all-reduce of one number; waits for the device."""
        if self.mesh is None:
            return yes
        votes = torch.tensor(float(yes), device=self.device)
        return all_reduce_(votes, self.world_group, dist.ReduceOp.MIN).item() == 1.0

    def together(self, what: str, action: Callable[[], Result]) -> Result:
        """`action()` of every rank, once all have done it. Where any fails, all raise: none is left waiting for another.

        InputError where it failed ("WHAT: reason", unless it is one already), PeerError elsewhere. The action must issue no
        collective.
        """
        failure: Exception | None = None
        try:
            result = action()
        except (InputError, OSError) as error:
            failure = error
        if self.all_agree(failure is None):
            return result
        if failure is None:
            raise PeerError(f"{what}: another rank failed, and says why")
        raise failure if isinstance(failure, InputError) else InputError(f"{what}: {failure}") from failure


@contextmanager
def parallel_state(config: ParallelConfig, *, seed: int, launch: Launch | None = None) -> Iterator[ParallelState]:
    """Joins the run, yields this rank's state, and leaves the process groups on the way out.

    Where torch.distributed is initialised already (tests, notebooks), its default group is used and left alone.
    InputError: a launch that cannot be read, a world size that is not a multiple of the tensor-parallel size,
    more ranks on a node than GPUs.
    """
    launch = read_launch() if launch is None else launch
    joined = dist.is_initialized()
    world_size = dist.get_world_size() if joined else launch.world_size
    try:
        dp_size = config.data_parallel_size(world_size)
    except ValueError as error:
        raise InputError(str(error)) from error
    device = choose_device(config, launch)
    if world_size > 1 and not joined:
        _join(config, launch, device)
    try:
        yield _build(config, device, dp_size=dp_size, world_size=world_size, seed=seed)
    finally:
        if world_size > 1 and not joined:
            dist.destroy_process_group()


def choose_device(config: ParallelConfig, launch: Launch) -> torch.device:
    """A GPU for this local rank where there are GPUs and the backend is not gloo, else the CPU."""
    if config.distributed_backend == "gloo" or not torch.cuda.is_available():
        if config.distributed_backend == "nccl":
            raise InputError("--distributed-backend nccl needs CUDA devices, and torch sees none: use gloo (or auto)")
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # Slurm may show each task only its own GPU (--gpus-per-task): then every local rank's is number 0.
    if launch.local_rank >= count and not (count == 1 and launch.launcher == "slurm"):
        raise InputError(f"local rank {launch.local_rank} has no GPU of its own: this node shows {count}. Start at most "
                         f"{count} processes per node, or use --distributed-backend gloo")
    device = torch.device("cuda", launch.local_rank if launch.local_rank < count else 0)
    torch.cuda.set_device(device)
    return device


def _join(config: ParallelConfig, launch: Launch, device: torch.device) -> None:
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    try:
        store = dist.TCPStore(launch.master_addr, launch.master_port, launch.world_size, timeout=timeout,
                              is_master=launch.rank == 0 and not launch.agent_owns_store, wait_for_workers=False)
    except RuntimeError as error:
        raise InputError(f"cannot meet the other ranks at {launch.master_addr}:{launch.master_port} ({error}): set MASTER_ADDR "
                         "to rank 0's host and MASTER_PORT to a free port of it") from error
    # A restarted run must not read the addresses that its dead predecessor left in a shared store.
    prefixed = dist.PrefixStore(f"attempt{launch.restart_count}", store)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=prefixed, rank=launch.rank,
                            world_size=launch.world_size, timeout=timeout,
                            device_id=device if device.type == "cuda" else None)


def _build(config: ParallelConfig, device: torch.device, *, dp_size: int, world_size: int, seed: int) -> ParallelState:
    if world_size == 1:
        return ParallelState(device=device, rng=RngStreams(device, seed=seed))
    tp_size = config.tensor_model_parallel_size
    mesh = init_device_mesh(device.type, (dp_size, tp_size), mesh_dim_names=("dp", "tp"))
    dp_rank, tp_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    return ParallelState(
        device=device,
        rng=RngStreams(device, seed=seed, tp_rank=tp_rank, dp_rank=dp_rank),
        mesh=mesh,
        tp_group=mesh.get_group("tp") if tp_size > 1 else None,
        dp_group=mesh.get_group("dp") if dp_size > 1 else None,
        tp_rank=tp_rank, tp_size=tp_size, dp_rank=dp_rank, dp_size=dp_size,
    )
