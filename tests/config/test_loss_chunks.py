"""The default of --loss-chunk-size: chunks of 512 tokens wherever they cost nothing."""

from __future__ import annotations

import pytest

from arguments import parse_args
from megatron_lite.config.notices import notices
from megatron_lite.config.run import RunConfig

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 1024 "
    "--vocab-size 127 --mock-data --train-iters 1 --lr 1e-3 --hidden-dropout 0 "
    "--attention-dropout 0"
)
# With each of these backward has to compute the logits of a chunk again.
TWO_PASSES = (
    "--bf16",
    "--fp16",
    "--use-torch-fsdp2",
    "--no-gradient-accumulation-fusion",
    "--torch-compile --activation-memory-budget 0.5",
)


def config_of(flags: str) -> RunConfig:
    return parse_args(f"{BASE} {flags}".split()).config


@pytest.mark.parametrize(
    ("flags", "chunk_size"),
    [
        ("--seq-length 512 --micro-batch-size 1", None),
        ("--seq-length 513 --micro-batch-size 1", 512),
        ("--seq-length 256 --micro-batch-size 2", None),
        ("--seq-length 256 --micro-batch-size 3", 512),
        ("--seq-length 1024 --micro-batch-size 1 --context-parallel-size 2", None),
        ("--seq-length 1024 --micro-batch-size 2 --context-parallel-size 2", 512),
        ("--seq-length 1024 --micro-batch-size 1 --tensor-model-parallel-size 2", 512),
        ("--seq-length 1024 --micro-batch-size 1 --use-distributed-optimizer", 512),
    ],
)
def test_a_float32_run_with_more_than_512_tokens_has_chunks(
    flags: str, chunk_size: int | None
) -> None:
    config = config_of(flags)
    assert config.loss_chunk_size == chunk_size
    assert config.loss_in_one_pass == (chunk_size is not None)
    assert config.training.loss_chunk_size is None  # so a changed run has a default of its own
    world_size = config.parallel.model_ranks
    assert len(notices(config, "log", world_size=world_size)) == (chunk_size is not None)


@pytest.mark.parametrize("flags", [*TWO_PASSES, "--loss-chunk-size 0"])
def test_a_run_whose_chunks_would_cost_something_has_whole_logits(flags: str) -> None:
    config = config_of(f"--seq-length 1024 --micro-batch-size 1 {flags}")
    assert config.loss_chunk_size is None
    assert not config.loss_in_one_pass


def test_a_given_size_is_taken() -> None:
    config = config_of("--seq-length 1024 --micro-batch-size 1 --bf16 --loss-chunk-size 100")
    assert config.loss_chunk_size == 100
    assert not notices(config, "log", world_size=1)
    assert not config.loss_in_one_pass
