"""ParallelState: who stands where in the mesh, what is None, and what is an error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_lite.config.checks import InputError
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.rng import DEFAULT, TENSOR_PARALLEL
from megatron_lite.parallel.state import choose_device, parallel_state, set_timeout
from tests.support.gpus import show_gpus
from tests.support.models import tp_state
from tests.support.ranks import run_ranks


def test_tensor_parallel_ranks_are_neighbours_in_the_mesh():
    def work(rank, world_size):
        with tp_state(2) as parallel:
            groups = (parallel.tp_group, parallel.dp_group)
            places = (parallel.tp_rank, parallel.dp_rank, parallel.rank)
            return *map(dist.get_process_group_ranks, groups), *places

    assert run_ranks(work, 4) == [
        ([0, 1], [0, 2], 0, 0, 0),
        ([0, 1], [1, 3], 1, 0, 1),
        ([2, 3], [0, 2], 0, 1, 2),
        ([2, 3], [1, 3], 1, 1, 3),
    ]


def test_streams_follow_the_place_in_the_mesh():
    """Ranks 0 and 1 share tokens, so their default streams are equal; ranks 0 and 2 hold other
    samples."""

    def work(rank, world_size):
        with tp_state(2) as parallel:
            drawn = {}
            for stream in (DEFAULT, TENSOR_PARALLEL):
                with parallel.rng.fork(stream):
                    drawn[stream] = torch.rand(3).tolist()
            return drawn

    drawn = run_ranks(work, 4)
    assert drawn[0][DEFAULT] == drawn[1][DEFAULT] != drawn[2][DEFAULT] == drawn[3][DEFAULT]
    assert len({tuple(of_rank[TENSOR_PARALLEL]) for of_rank in drawn}) == 4


def test_a_world_that_does_not_divide_is_an_error_that_says_what_to_start():
    config = ParallelConfig(tensor_model_parallel_size=2, distributed_backend="gloo")
    message = (
        r"world size 3 is not a multiple of --tensor-model-parallel-size 2: start a multiple "
        r"of 2 processes "
        r"\(torchrun --nproc_per_node, srun --ntasks\)"
    )
    launch = Launch(launcher="torchrun", world_size=3)
    with pytest.raises(InputError, match=message), parallel_state(config, seed=1, launch=launch):
        pass


@pytest.mark.parametrize(
    ("gpus", "launcher", "local_rank", "backend", "expected"),
    [
        (0, "single", 0, "nccl", "--distributed-backend nccl needs CUDA devices.*use gloo"),
        (0, "single", 0, "auto", "cpu"),
        (4, "torchrun", 2, "gloo", "cpu"),
        (4, "torchrun", 2, "auto", "cuda:2"),
        (4, "torchrun", 4, "auto", "local rank 4 has no GPU of its own: this node shows 4. Start"),
        (1, "slurm", 3, "auto", "cuda:0"),  # Slurm shows each task only its own GPU
        (1, "torchrun", 3, "auto", "local rank 3 has no GPU"),
    ],
)
def test_each_local_rank_takes_a_gpu_of_its_own(
    monkeypatch, gpus, launcher, local_rank, backend, expected
):
    taken = show_gpus(monkeypatch, gpus)
    config = ParallelConfig(distributed_backend=backend)
    launch = Launch(launcher=launcher, rank=local_rank, world_size=8, local_rank=local_rank)
    if " " in expected:
        with pytest.raises(InputError, match=expected):
            choose_device(config, launch)
        return
    assert choose_device(config, launch) == torch.device(expected)
    assert taken == [torch.device(expected)] * expected.startswith("cuda")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (dict(), [0, 1, 2, 3]),
        (dict(context_parallel_size=2), [0, 1, 2, 3]),
        (dict(context_parallel_size=4), [0, 1, 2, 3]),
        (dict(tensor_model_parallel_size=2), [0, 2]),
        (dict(tensor_model_parallel_size=2, context_parallel_size=2), [0, 2]),
        (dict(tensor_model_parallel_size=4), None),
    ],
)
def test_the_data_mesh_has_the_ranks_of_the_data_group(sizes, expected):
    """As FSDP2 wants them: on one axis, data-parallel and context-parallel ranks together."""

    def work(rank, world_size):
        with parallel_state(
            ParallelConfig(distributed_backend="gloo", **sizes), seed=1
        ) as parallel:
            if parallel.dp_cp_mesh is None:
                return None if parallel.dp_cp_group is None else "no mesh"
            assert (
                parallel.dp_cp_mesh.ndim == 1
                and parallel.dp_cp_mesh.get_local_rank() == parallel.dp_cp_rank
            )
            ranks = parallel.dp_cp_mesh.mesh.tolist()
            assert ranks == torch.distributed.get_process_group_ranks(parallel.dp_cp_group)
            return ranks

    assert run_ranks(work, 4)[0] == expected


def test_a_shorter_timeout_spares_the_group_that_waits_for_disks():
    def work(rank, world_size):
        with tp_state(2) as parallel:
            set_timeout(7.0)
            return [
                group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
                for group in (parallel.world_group, parallel.tp_group, parallel.saver_group)
            ]

    assert run_ranks(work, 2, detail=False) == [[7.0, 7.0, 600.0]] * 2
