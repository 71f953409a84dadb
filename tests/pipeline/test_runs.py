"""Whole runs as a pipeline, through the trainer: losses, checkpoints, resuming, what is logged and
what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arguments import parse_args
from megatron_lite.config.checks import InputError
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.memory.predict.pipeline_memory import rank_memory, ticks
from tests.support.ranks import run_ranks
from tests.support.runs import run_to_end, tiny_run


def in_layout(config: RunConfig, **sizes: object) -> RunConfig:
    return replace(config, parallel=ParallelConfig(distributed_backend="gloo", **sizes))


PIPELINE = dict(pipeline_model_parallel_size=2)
INTERLEAVED = dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)


def test_micro_batches_that_do_not_fit_the_interleaved_order_are_one_error():
    config = in_layout(
        tiny_run(model=dict(num_layers=4), training=dict(global_batch_size=3)), **INTERLEAVED
    )

    def work(rank, world_size):
        with pytest.raises(
            InputError,
            match="--global-batch-size: a batch of 3 samples.*--pipeline-model-parallel-size 2",
        ):
            run_to_end(config)
        return True

    assert run_ranks(work, 2) == [True, True]


SIZES = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 "
    "--micro-batch-size 1 --vocab-size 99 "
)
KEPT = "--num-microbatches-with-partial-activation-checkpoints 1 "


@pytest.mark.parametrize(("num_chunks", "num_kept"), [(1, 2), (2, 6), (3, 8)])
def test_a_rank_never_holds_more_than_with_the_micro_batches_that_are_priced(num_kept, num_chunks):
    words = (
        SIZES.replace("--num-layers 8", "--num-layers 18")
        + "--pipeline-model-parallel-size 3 --recompute-policy *:full "
        + KEPT.replace("1 ", f"{num_kept} ")
    )
    words += f"--num-virtual-stages-per-pipeline-rank {num_chunks} " if num_chunks > 1 else ""
    config = parse_args((words + "--global-batch-size 120").split()).config
    for rank in range(3):
        longest = max(
            tick.kept_bytes for tick in ticks(config, "cpu", rank=rank, num_microbatches=120)
        )
        assert rank_memory(config, "cpu", rank).held_bytes == longest
