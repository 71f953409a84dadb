"""The processes of a run as one frozen value.

It holds a (pp, dp, cp, tp) mesh, the groups of the mesh, and this rank's place, device and RNG
streams.

    world of 4, --tensor-model-parallel-size 2    tp: 0 1    ranks 0 and 1 hold the shards of one
                                              dp: 0   0 1    model; ranks 0 and 2 hold the same
                                                  1   2 3    shard and average their gradients

Tensor-parallel ranks are neighbours. Context-parallel, data-parallel and pipeline ranks follow, in
this order, as in Megatron. A group of one rank is None, and no collective is issued for it.
Nothing here is global: callers pass the state down as an argument.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_lite.config.checks import InputError, PeerError, input_faults
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.run import RunConfig

from .collectives import Group, gather_values
from .launch import Launch, read_launch
from .parameter_spec import ParameterSpec
from .rng import RngStreams
from .torch_internals import flattened_mesh, set_group_timeout, world

Result = TypeVar("Result")
SAVER = "saver"  # the description of the group whose ranks wait for the slowest disk

# For tests on one GPU: "1" in this variable of the environment keeps the groups of one data- or
# tensor-parallel rank, whose collectives then run.
GROUPS_OF_ONE = "MEGATRON_LITE_GROUPS_OF_ONE"


@dataclass(frozen=True, kw_only=True)
class ParallelState:
    """This rank's place in the mesh. A group is None if it would hold one rank.

    dp_cp_group: the ranks with the same parameters and different tokens. They sum their gradients.
        The group joins the data-parallel and the context-parallel axis.
    shard_group: the ranks of `dp_cp_group` over which ZeRO-1 and FSDP2 share out states: all, or
        neighbours (--num-distributed-optimizer-instances). replica_group: those with the same
        share. shard_mesh has the ranks on an axis for shares, behind one for replicas, if any.
    pp_direction_groups: four groups of the pipeline's ranks, or none without a pipeline. Groups 0
        and 1 carry forward and backward tensors between neighbouring ranks. Groups 2 and 3 carry
        them between the last rank and the first, which is needed if a rank holds several stages.
        With two ranks, both ways join the same pair of ranks. NCCL runs the transfers between two
        ranks of a group in order, and in one group they would wait for each other.
    embedding_group: the first and the last pipeline rank, which share a tied embedding. It is None
        on the ranks between them.
    ep_group: the ranks over which the experts of a layer are spread. token_dispatcher: how tokens
        reach them (--moe-token-dispatcher-type). imbalance: the rows of a rank in a dry run, over
        those of a balanced choice (--plan-moe-imbalance).
    experts: the place of this rank for the parameters of experts, if their groups are not those of
        other parameters (parallel/expert_groups.py).
    saver_group: all ranks, over gloo. Only the writer of a checkpoint uses it, since it may run in
        a background thread beside the collectives of a step.
    """

    device: torch.device
    rng: RngStreams
    world_group: Group = None
    shard_mesh: DeviceMesh | None = None
    tp_group: Group = None
    cp_group: Group = None
    dp_group: Group = None
    dp_cp_group: Group = None
    shard_group: Group = None
    replica_group: Group = None
    pp_group: Group = None
    pp_direction_groups: tuple[ProcessGroup, ...] = ()
    embedding_group: Group = None
    ep_group: Group = None
    experts: ParallelState | None = None
    saver_group: Group = None
    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    num_instances: int = 1
    token_dispatcher: str = ""
    imbalance: float = 1.0

    @property
    def rank(self) -> int:
        """The global rank.

        TP ranks are neighbours (one node); pipeline ranks are farthest apart.
        """
        return (
            (self.pp_rank * self.dp_size + self.dp_rank) * self.cp_size + self.cp_rank
        ) * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the run."""
        return self.pp_size * self.dp_size * self.cp_size * self.tp_size

    @property
    def dp_cp_rank(self) -> int:
        """This rank's place in `dp_cp_group`."""
        return self.dp_rank * self.cp_size + self.cp_rank

    @cached_property
    def dp_cp_size(self) -> int:
        """The size of `dp_cp_group`."""
        return self.dp_size * self.cp_size

    @property
    def shard_rank(self) -> int:
        """This rank's place in `shard_group`."""
        return self.dp_cp_rank % self.shard_size

    @property
    def shard_size(self) -> int:
        """The size of `shard_group`."""
        return self.dp_cp_size // self.num_instances

    def holding(self, spec: ParameterSpec) -> ParallelState:
        """Returns the place of this rank whose groups are those of a parameter.

        Its TP ranks hold the shards of the parameter, and its `dp_cp_group` the same values.
        """
        return self.experts if spec.of_experts and self.experts is not None else self

    def gathered(self, own: Any) -> list[Any]:
        """Returns the value (of JSON) of every rank, by rank. Issues two all-gathers."""
        return gather_values(own, self.world_group)

    def together(self, what: str, action: Callable[[], Result]) -> Result:
        """Runs `action()` on every rank and returns this rank's result once all ranks succeeded.

        If it fails on any rank, all ranks raise, and none is left waiting for another. A failure is
        an InputError or an OSError. A rank that failed raises InputError: its own, or the OSError
        as "WHAT: reason". The other ranks raise PeerError. The action must issue no collective.
        Issues the two all-gathers of `gathered`.
        """
        failure = None
        try:
            result = action()
        except InputError as error:
            failure = error
        except OSError as error:
            failure = InputError(f"{what}: {error}")
            failure.__cause__ = error
        if all(self.gathered(failure is None)):
            return result
        raise failure or PeerError(f"{what}: another rank failed, and says why")


def set_timeout(seconds: float) -> None:
    """Sets the timeout of all later collectives of every group that this process is in.

    The group of background saves keeps its own timeout. Issues no collective; every rank should
    call it.
    """
    if dist.is_initialized():
        for group in world.pg_map:
            if group.group_desc != SAVER:
                set_group_timeout(datetime.timedelta(seconds=seconds), group)


@contextmanager
def parallel_state(
    config: ParallelConfig, *, seed: int, launch: Launch | None = None, run: RunConfig | None = None
) -> Iterator[ParallelState]:
    """Joins the run, yields this rank's state, and destroys the process groups on exit.

    If torch.distributed is initialised already (tests, notebooks), its default group is used and
    stays alive. Raises InputError if the launch cannot be read
    or a node has more ranks than GPUs. It raises InputError too if the world size is not a multiple
    of one model's ranks, or if a check of startup.py fails.

    run: the settings of the run, which must be the same on every rank.
    """
    launch = read_launch() if launch is None else launch
    joined = dist.is_initialized()
    world_size = dist.get_world_size() if joined else launch.world_size
    with input_faults():
        dp_size = config.data_parallel_size(world_size)
    device = choose_device(config, launch)
    on_gpu = device.type == "cuda"
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    with ExitStack() as leaving, ExitStack() as making:
        if world_size > 1 and not joined:
            from .startup import absent_named, meet, settings_of

            settings = settings_of(run, launch.world_size)
            tp_size = config.tensor_model_parallel_size
            store = meet(launch, settings, tp_size=tp_size, timeout=timeout)
            making.enter_context(absent_named(store, launch, timeout))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=store,
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timeout,
                device_id=device if on_gpu else None,
            )
            leaving.callback(dist.destroy_process_group)
        parallel = _build(config, device, dp_size=dp_size, world_size=world_size, seed=seed)
        making.close()
        yield parallel


def choose_device(config: ParallelConfig, launch: Launch) -> torch.device:
    """Returns this local rank's GPU, or the CPU if torch sees no GPU or the backend is gloo.

    Raises InputError if the backend is nccl without a GPU, or if this local rank has no own GPU.
    """
    backend = config.distributed_backend
    if backend == "gloo" or not torch.cuda.is_available():
        if backend == "nccl":
            raise InputError(
                "--distributed-backend nccl needs CUDA devices, and torch sees none: use gloo "
                "(or auto)"
            )
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # Slurm may show each task only its own GPU (--gpus-per-task). That GPU has number 0 for every
    # local rank.
    if launch.local_rank >= count and not (count == 1 and launch.launcher == "slurm"):
        raise InputError(
            f"local rank {launch.local_rank} has no GPU of its own: this node shows {count}. Start "
            f"at most {count} processes per node, or use --distributed-backend gloo"
        )
    device = torch.device("cuda", launch.local_rank if launch.local_rank < count else 0)
    torch.cuda.set_device(device)
    return device


def _build(
    config: ParallelConfig, device: torch.device, *, dp_size: int, world_size: int, seed: int
) -> ParallelState:
    keeps_one = os.environ.get(GROUPS_OF_ONE) == "1"
    if world_size == 1 and not keeps_one:
        return ParallelState(device=device, rng=RngStreams(device, seed=seed))
    sizes = {
        "pp": config.pipeline_model_parallel_size,
        "dp": dp_size,
        "cp": config.context_parallel_size,
        "tp": config.tensor_model_parallel_size,
    }
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    places: dict[str, Any] = {}
    for axis, size in sizes.items():
        has_group = size > 1 or (keeps_one and axis in ("dp", "tp"))
        places[f"{axis}_group"] = mesh.get_group(axis) if has_group else None
        places[f"{axis}_rank"] = mesh.get_local_rank(axis)
        places[f"{axis}_size"] = size
    dp_cp_mesh = None
    if dp_size > 1 and sizes["cp"] > 1:
        dp_cp_mesh = flattened_mesh(mesh["dp", "cp"], "data")
    elif dp_size > 1 or sizes["cp"] > 1 or keeps_one:
        dp_cp_mesh = mesh["cp" if sizes["cp"] > 1 else "dp"]
    shard_mesh = dp_cp_mesh
    dp_cp_group = shard_group = None if dp_cp_mesh is None else dp_cp_mesh.get_group()
    # torch requires that every rank makes all new groups in the same order, even those that it is
    # not in. The order of the calls below is therefore the same on all ranks.
    replica_group, instances = None, config.num_distributed_optimizer_instances
    if instances > 1:
        shape = sizes["pp"], instances, dp_size * sizes["cp"] // instances, sizes["tp"]
        places_of = mesh.mesh.view(shape)
        shard_group, replica_group = subgroups(places_of, 2), subgroups(places_of, 1)
        shard_mesh = None
        if shard_group is not None and replica_group is not None:
            own = (places_of == dist.get_rank()).nonzero()[0]
            shard_mesh = DeviceMesh.from_group(
                [replica_group, shard_group],
                device.type,
                mesh=places_of[own[0], :, :, own[3]],
                mesh_dim_names=("replicas", "shards"),
            )
    parallel = ParallelState(
        device=device,
        rng=RngStreams(
            device,
            seed=seed,
            tp_rank=places["tp_rank"],
            dp_rank=places["dp_rank"] * sizes["cp"] + places["cp_rank"],
            pp_rank=places["pp_rank"],
        ),
        world_group=dist.group.WORLD,
        dp_cp_group=dp_cp_group,
        shard_group=shard_group,
        replica_group=replica_group,
        shard_mesh=shard_mesh,
        num_instances=instances,
        pp_direction_groups=tuple(filter(None, (subgroups(mesh.mesh, 0) for _ in range(4)))),
        embedding_group=_embedding_group(mesh.mesh, places["pp_group"]),
        saver_group=dist.new_group(
            backend="gloo" if device.type == "cuda" else None,
            group_desc=SAVER,
            timeout=datetime.timedelta(minutes=config.distributed_timeout_minutes),
        ),
        **places,
    )
    if not config.spreads_experts:
        return parallel
    from .expert_groups import with_experts

    return with_experts(parallel, config)


def subgroups(ranks: Tensor, dim: int) -> Group:
    """Returns the group of this rank along a dim of ranks' numbers; None for one rank, and for a
    rank that is not among them. Every rank must call it."""
    lists = ranks.movedim(dim, -1).flatten(0, -2).tolist()
    return dist.new_subgroups_by_enumeration(lists)[0] if len(lists[0]) > 1 else None


def _embedding_group(ranks: Tensor, pp_group: Group) -> Group:
    if pp_group is None or pp_group.size() == 2:  # two stages are the first and the last one
        return pp_group
    return subgroups(ranks[[0, -1]], 0)
