"""Small training runs on mock data, in the test's own processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.data_settings import DataConfig, TokenizerConfig
from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.optimizer_settings import LrScheduleConfig
from megatron_lite.config.parallel import DataParallelConfig, ParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import TrainingConfig
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.build_trainer import build_trainer
from megatron_lite.training.loop import Trainer

TIMINGS = ("iteration_ms", "tokens_per_second")


def tiny_run(
    *,
    tp_size: int = 1,
    sequence_parallel: bool = False,
    model: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    metrics: Path | None = None,
    learning_rate: float | None = None,
    data_parallel: DataParallelConfig | None = None,
) -> RunConfig:
    """Returns the config of a run of 20 iterations of 4 samples, with dropout.

    The vocabulary has 98 + 1 ids and is padded to a multiple of 64 x TP.
    """
    return RunConfig(
        model=ModelConfig(
            **{
                **dict(
                    num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16
                ),
                **(model or {}),
            }
        ),
        training=TrainingConfig(
            **{
                **dict(micro_batch_size=1, global_batch_size=4, train_iters=20, eval_iters=1),
                **(training or {}),
            }
        ),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp_size,
            sequence_parallel=sequence_parallel,
            distributed_backend="gloo",
        ),
        data_parallel=data_parallel or DataParallelConfig(),
        data=DataConfig(seq_length=16, mock_data=True),
        tokenizer=TokenizerConfig(vocab_size=98, make_vocab_size_divisible_by=64),
        lr_schedule=_schedule(learning_rate, by_samples="train_samples" in (training or {})),
        checkpoint=CheckpointConfig(**(checkpoint or {})),
        logging=LoggingConfig(
            log_interval=5, metrics_jsonl=None if metrics is None else str(metrics)
        ),
    )


def _schedule(constant: float | None, *, by_samples: bool) -> LrScheduleConfig:
    if constant is not None:
        return LrScheduleConfig(lr=constant, lr_decay_style="constant")
    if by_samples:
        return LrScheduleConfig(lr=1e-2, lr_decay_style="cosine", lr_warmup_samples=12)
    return LrScheduleConfig(lr=1e-2, lr_decay_style="cosine", lr_warmup_iters=3, lr_decay_iters=20)


def run_to_end(config: RunConfig) -> Trainer:
    """Runs the config in this process. Returns the finished trainer.

    If a default group is initialised, this process is one of its ranks.
    """
    with parallel_state(config.parallel, seed=config.training.seed) as parallel:
        trainer = build_trainer(config, parallel)
        trainer.run()
    return trainer


def with_checkpoint(config: RunConfig, **fields: Any) -> RunConfig:
    """Returns the run's config with other --save and --load settings."""
    return replace(config, checkpoint=CheckpointConfig(**fields))


def rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics file without their timings."""
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMINGS}
        for line in path.read_text().splitlines()
    ]


def step_bytes(root: Path, iteration: int) -> dict[str, bytes]:
    """Returns the bytes of every tensor file of a checkpoint, by name."""
    return {
        path.name: path.read_bytes()
        for path in sorted((root / f"iter_{iteration:07d}").glob("*.safetensors"))
    }
