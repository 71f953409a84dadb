"""The processes of a run as one frozen value: a (pp, dp, cp, tp) mesh, its groups, this rank's place, device and RNG streams.

    world of 4, --tensor-model-parallel-size 2        tp: 0 1      ranks 0 and 1 hold the shards of one model,
                                                  dp: 0   0 1      ranks 0 and 2 hold the same shard and
                                                      1   2 3      average their gradients
Tensor-parallel ranks are neighbours, then come context-parallel, data-parallel and pipeline ranks, as in Megatron.
A group of one rank is None, and no collective is issued for it. Nothing here is global: hand the state down.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.launch import Launch, read_launch
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.startup import check_start, settings_of
from megatron_lite.parallel.timeouts import SAVER

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ParallelState:
    """This rank's place in the mesh. `mesh` and each group are None where they would hold one rank.

    data_group: the ranks with the same parameters and other tokens, data-parallel and context-parallel: they add up gradients.
    pp_lanes: groups of the pipeline's ranks, one for each direction in which tensors travel (pipeline/links.py).
    embedding_group: first and last pipeline rank, which share a tied embedding; None on the others too.
    saver_group: all ranks, for what a background thread sends while it writes a checkpoint, and for nothing else. gloo.
    """

    device: torch.device
    rng: RngStreams
    mesh: DeviceMesh | None = None
    tp_group: ProcessGroup | None = None
    cp_group: ProcessGroup | None = None
    dp_group: ProcessGroup | None = None
    data_group: ProcessGroup | None = None
    pp_group: ProcessGroup | None = None
    pp_lanes: tuple[ProcessGroup, ...] = ()
    embedding_group: ProcessGroup | None = None
    saver_group: ProcessGroup | None = None
    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def rank(self) -> int:
        """Global rank. A TP group's ranks are neighbours (one node); pipeline ranks are farthest apart."""
        return ((self.pp_rank * self.dp_size + self.dp_rank) * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """All ranks of the run."""
        return self.pp_size * self.dp_size * self.cp_size * self.tp_size

    @property
    def data_rank(self) -> int:
        """The place in `data_group`."""
        return self.dp_rank * self.cp_size + self.cp_rank

    @property
    def data_size(self) -> int:
        """The size of `data_group`."""
        return self.dp_size * self.cp_size

    @property
    def data_mesh(self) -> DeviceMesh | None:
        """`data_group` as a mesh of one axis."""
        if self.mesh is None or self.data_group is None:
            return None
        return self.mesh["data" if self.dp_size > 1 and self.cp_size > 1 else "dp" if self.dp_size > 1 else "cp"]

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
def parallel_state(config: ParallelConfig, *, seed: int, launch: Launch | None = None, run: RunConfig | None = None,
                   ) -> Iterator[ParallelState]:
    """Joins the run, yields this rank's state, and leaves the process groups on the way out.

    Where torch.distributed is initialised already (tests, notebooks), its default group is used and left alone.
    InputError: a launch that cannot be read, a world size that is not a multiple of one model's ranks, more ranks on a
    node than GPUs, and what startup.py finds. run: must be the same on every rank.
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
        _join(config, launch, device, run)
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


def _join(config: ParallelConfig, launch: Launch, device: torch.device, run: RunConfig | None) -> None:
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    try:
        store = dist.TCPStore(launch.master_addr, launch.master_port, launch.world_size, timeout=timeout,
                              is_master=launch.rank == 0 and not launch.agent_owns_store, wait_for_workers=False)
    except RuntimeError as error:
        raise InputError(f"cannot meet the other ranks at {launch.master_addr}:{launch.master_port} ({error}): set MASTER_ADDR "
                         "to rank 0's host and MASTER_PORT to a free port of it") from error
    # A restarted run must not read the addresses that its dead predecessor left in a shared store.
    prefixed = dist.PrefixStore(f"attempt{launch.restart_count}", store)
    check_start(dist.PrefixStore("start", prefixed), launch, settings_of(run, launch.world_size),
                tp_size=config.tensor_model_parallel_size, timeout=timeout)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=prefixed, rank=launch.rank,
                            world_size=launch.world_size, timeout=timeout,
                            device_id=device if device.type == "cuda" else None)


def _build(config: ParallelConfig, device: torch.device, *, dp_size: int, world_size: int, seed: int) -> ParallelState:
    if world_size == 1:
        return ParallelState(device=device, rng=RngStreams(device, seed=seed))
    sizes = {"pp": config.pipeline_model_parallel_size, "dp": dp_size, "cp": config.context_parallel_size,
             "tp": config.tensor_model_parallel_size}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    ranks = {axis: mesh.get_local_rank(axis) for axis in sizes}
    groups = {axis: mesh.get_group(axis) if size > 1 else None for axis, size in sizes.items()}
    data_rank = ranks["dp"] * sizes["cp"] + ranks["cp"]
    return ParallelState(
        device=device,
        rng=RngStreams(device, seed=seed, tp_rank=ranks["tp"], dp_rank=data_rank, pp_rank=ranks["pp"]),
        mesh=mesh, data_group=_data_group(mesh, groups),
        pp_lanes=_lanes(mesh, config), embedding_group=_embedding_group(mesh, groups["pp"]),
        saver_group=dist.new_group(backend="gloo" if device.type == "cuda" else None, group_desc=SAVER,
                                   timeout=datetime.timedelta(minutes=config.distributed_timeout_minutes)),
        **{f"{axis}_{what}": values[axis] for what, values in (("group", groups), ("rank", ranks), ("size", sizes))
           for axis in sizes},  # type: ignore[arg-type]
    )


def _data_group(mesh: DeviceMesh, groups: Mapping[str, ProcessGroup | None]) -> ProcessGroup | None:
    if groups["dp"] is not None and groups["cp"] is not None:
        return mesh["dp", "cp"]._flatten("data").get_group()
    return groups["dp"] or groups["cp"]


def _lanes(mesh: DeviceMesh, config: ParallelConfig) -> tuple[ProcessGroup, ...]:
    """Forward, backward; and where several stages share a rank the same for the way from the last rank to the first: with two
    ranks that would be the way of the other direction, and NCCL runs what goes between two ranks of a group in order."""
    if config.pipeline_model_parallel_size == 1:
        return ()
    pipelines = mesh.mesh.flatten(1).t().tolist()
    return tuple(dist.new_subgroups_by_enumeration(pipelines)[0] for _ in range(4))


def _embedding_group(mesh: DeviceMesh, pp_group: ProcessGroup | None) -> ProcessGroup | None:
    if pp_group is None or pp_group.size() == 2:
        return pp_group
    ends = [[pipeline[0], pipeline[-1]] for pipeline in mesh.mesh.flatten(1).t().tolist()]
    group = dist.new_subgroups_by_enumeration(ends)[0]
    return group if pp_group.rank() in (0, pp_group.size() - 1) else None
