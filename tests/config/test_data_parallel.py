"""The rule that spans data parallelism and the pipeline. Those of the flags alone are in tests/test_arguments.py."""

from __future__ import annotations

import pytest

from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import DataConfig, TokenizerConfig, TrainingConfig


def run(stages: int, data_parallel: DataParallelConfig) -> RunConfig:
    return RunConfig(model=ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=4, max_position_embeddings=8),
                     training=TrainingConfig(micro_batch_size=1), data=DataConfig(seq_length=8), data_parallel=data_parallel,
                     tokenizer=TokenizerConfig(vocab_size=9), parallel=ParallelConfig(pipeline_model_parallel_size=stages))


def test_a_pipeline_goes_with_a_distributed_optimizer_and_not_with_fsdp2() -> None:
    sharded, distributed = DataParallelConfig(use_torch_fsdp2=True), DataParallelConfig(use_distributed_optimizer=True)
    assert run(1, sharded) and run(2, distributed)
    with pytest.raises(ValueError, match=r"^--use-torch-fsdp2 needs --pipeline-model-parallel-size 1 \(got 2\), as a stage's"):
        run(2, sharded)


def test_a_run_is_the_same_after_json_with_and_without_the_topic() -> None:
    config = run(1, DataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, ddp_bucket_size=7))
    assert RunConfig.from_json(config.to_json()) == config
