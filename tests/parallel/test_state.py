"""ParallelState: who stands where in the mesh, what is None, and what is an error."""

import pytest
import torch
import torch.distributed as dist

from megatron_lite.config.checks import InputError
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.state import choose_device, parallel_state, set_timeout
from tests.support.gpus import show_gpus
from tests.support.models import on_ranks


@pytest.mark.long
def test_instances_are_megatrons_and_their_replicas_hold_the_same_share():
    from megatron.core.parallel_state import RankGenerator

    def work(parallel):
        groups = parallel.shard_group, parallel.replica_group
        return *map(dist.get_process_group_ranks, groups), parallel.shard_rank

    whole = RankGenerator(tp=2, ep=1, dp=2, pp=1, cp=2, order="tp-cp-ep-dp-pp").get_ranks("dp-cp")
    found = on_ranks(work, 8, tp_size=2, cp_size=2, num_distributed_optimizer_instances=2)
    for rank, (shards, replicas, place) in enumerate(found):
        (ranks,) = (one for one in whole if rank in one)
        first, second = ranks[:2], ranks[2:]  # as initialize_model_parallel cuts them
        assert shards == (first if rank in first else second)
        assert replicas == [first[place], second[place]] and rank == shards[place]


def test_instances_that_do_not_divide_the_ranks_are_an_error():
    config = ParallelConfig(num_distributed_optimizer_instances=3)
    with pytest.raises(ValueError, match="instances 3 does not divide the 4 data-parallel ranks"):
        config.data_parallel_size(4)
    config = ParallelConfig(num_distributed_optimizer_instances=4, expert_model_parallel_size=2)
    with pytest.raises(ValueError, match="does not divide the 2 ranks with the same experts"):
        config.data_parallel_size(4)


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
    "gpus, launcher, local_rank, backend, expected",
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


def test_a_shorter_timeout_spares_the_group_that_waits_for_disks():
    def work(parallel):
        set_timeout(7.0)
        return [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in (parallel.world_group, parallel.tp_group, parallel.saver_group)
        ]

    assert on_ranks(work, 2, tp_size=2, detail=False) == [[7.0, 7.0, 600.0]] * 2
