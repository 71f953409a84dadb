"""The groups of the experts' parameters: Megatron's order of ranks.

    one pipeline stage of 8 ranks, --tensor-model-parallel-size 2 --expert-model-parallel-size 2

        --expert-tensor-parallel-size 2 (as TP)         --expert-tensor-parallel-size 1
    shards of an expert     0 1, 2 3, 4 5, 6 7          -
    experts are spread      0 2, 1 3, 4 6, 5 7          0 1, 2 3, 4 5, 6 7
    the same experts        0 4, 1 5, 2 6, 3 7          0 2 4 6, 1 3 5 7

Neighbours share an expert, the next ranks hold other experts, and the last ones hold the same
experts for other tokens and sum their gradients. Context-parallel ranks count as data-parallel.
"""

from dataclasses import replace

import torch

from megatron_lite.config.parallel import ParallelConfig

from .state import ParallelState, subgroups


def with_experts(parallel: ParallelState, config: ParallelConfig) -> ParallelState:
    """Returns the state with its groups of experts. Every rank must call it."""
    tp_size, ep_size = config.expert_tensor_parallel, config.expert_model_parallel_size
    # rank = ((stage * copies + copy) * ep_size + ep_rank) * tp_size + tp_rank
    ranks = torch.arange(parallel.world_size).view(parallel.pp_size, -1, ep_size, tp_size)
    copies = ranks.shape[1]
    _, copy, ep_rank, tp_rank = (ranks == parallel.rank).nonzero()[0].tolist()

    same, spread = subgroups(ranks, 1), subgroups(ranks, 2)
    shard_group, replica_group = same, None
    if parallel.num_instances > 1:
        instances = ranks.unflatten(1, (parallel.num_instances, -1))
        shard_group, replica_group = subgroups(instances, 2), subgroups(instances, 1)
    experts = replace(
        parallel,
        tp_group=parallel.tp_group if tp_size == parallel.tp_size else subgroups(ranks, 3),
        tp_rank=tp_rank,
        tp_size=tp_size,
        shard_mesh=None,
        dp_group=same,
        dp_cp_group=same,
        shard_group=shard_group,
        replica_group=replica_group,
        dp_rank=copy,
        dp_size=copies,
        cp_group=None,
        cp_rank=0,
        cp_size=1,
        ep_group=spread,
        ep_rank=ep_rank,
        ep_size=ep_size,
        token_dispatcher=config.moe_token_dispatcher_type,
        imbalance=config.plan_moe_imbalance,
    )
    return replace(parallel, experts=experts)
