"""The flags of ParallelConfig and DataParallelConfig."""

from __future__ import annotations

import argparse

from megatron_lite.cli.arguments.flag_group import FlagGroup
from megatron_lite.config import megatron_values
from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.parallel import CP_COMM_TYPES, DISTRIBUTED_BACKENDS, ParallelConfig


def add_parallel_flags(parser: argparse.ArgumentParser) -> None:
    group = FlagGroup(parser, "parallelism", ParallelConfig)
    group.value("--tensor-model-parallel-size", int, "ranks that share each layer")
    group.switch(
        "--sequence-parallel",
        "split norms and dropout over the tensor-parallel ranks, along the sequence",
    )
    group.value(
        "--pipeline-model-parallel-size", int, "ranks that share the layers, one behind the other"
    )
    group.value(
        "--num-layers-per-virtual-pipeline-stage",
        int,
        "several stages of so many layers on each pipeline rank",
    )
    group.value("--num-virtual-stages-per-pipeline-rank", int, "the same, by their number")
    group.value(
        "--decoder-first-pipeline-num-layers",
        int,
        "layers of the first pipeline rank, if not as many as of the others",
    )
    group.value("--decoder-last-pipeline-num-layers", int, "layers of the last pipeline rank")
    group.switch(
        "--account-for-embedding-in-pipeline-split",
        "one layer less on the first pipeline rank than on the others",
    )
    group.switch(
        "--account-for-loss-in-pipeline-split",
        "one layer less on the last pipeline rank than on the others",
    )
    group.off_switch(
        "--no-overlap-p2p-communication",
        "overlap_p2p_comm",
        "receive what a stage needs only when it needs it",
    )
    group.value("--context-parallel-size", int, "ranks that share each sequence")
    group.value(
        "--cp-comm-type",
        str,
        "how context-parallel ranks exchange keys and values: around a ring, or all at once",
        values=(*CP_COMM_TYPES, *megatron_values.CP_COMM_TYPES),
        nargs="+",
    )
    group.value(
        "--distributed-backend",
        str,
        "auto: nccl on CUDA, else gloo; gloo keeps the run on the CPU",
        values=DISTRIBUTED_BACKENDS,
    )
    group.value(
        "--distributed-timeout-minutes",
        int,
        "time after which a collective gives up, and the run with it",
    )
    group.value(
        "--distributed-timeout-seconds-after-init",
        int,
        "the same from the second iteration on; it must cover the writing of a checkpoint, for "
        "which ranks wait",
    )


def add_data_parallel_flags(parser: argparse.ArgumentParser) -> None:
    group = FlagGroup(parser, "data parallelism", DataParallelConfig)
    group.switch(
        "--overlap-grad-reduce",
        "sum gradients over the data-parallel ranks bucket by bucket, beside backward",
    )
    group.value(
        "--ddp-bucket-size",
        int,
        "parameters of a bucket; derived: 40 million, or 1 million per data-parallel rank",
    )
    group.switch(
        "--grad-reduce-in-bf16",
        "exchange gradients in bfloat16 (each rank sums its micro-batches in float32)",
    )
    group.switch(
        "--use-distributed-optimizer",
        "optimizer states and master weights over the data-parallel ranks (ZeRO-1)",
    )
    group.switch("--overlap-param-gather", "gather the updated weights beside the next forward")
    group.switch(
        "--use-torch-fsdp2",
        "weights, gradients and optimizer states over the data-parallel ranks, layer by layer",
    )
    group.switch(
        "--use-megatron-fsdp",
        "the same as --use-torch-fsdp2 or --use-distributed-optimizer, by the sharding strategy",
    )
    group.value(
        "--data-parallel-sharding-strategy",
        str,
        "what --use-megatron-fsdp shares out (default: no_shard)",
        values=tuple(megatron_values.SHARDING_STRATEGIES),
    )
    group.off_switch(
        "--torch-fsdp2-no-reshard-after-forward",
        "torch_fsdp2_reshard_after_forward",
        "keep a layer's weights from its forward until its backward",
    )
    group.switch(
        "--fsdp-memory-efficient-wrapping",
        "gather token embedding and output projection by themselves, when needed",
    )
