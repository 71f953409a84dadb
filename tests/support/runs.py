"""Small training runs on mock data, in the test's own processes."""

import json
from dataclasses import replace
from pathlib import Path

from megatron_lite.api import run_config
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.build_trainer import build_trainer
from tests.support.ranks import run_ranks

TIMINGS = ("iteration_ms", "tokens_per_second")


def tiny_run(*, tp_size=1, metrics=None, learning_rate=None, **settings):
    """Returns the config of a run of 20 iterations of 4 samples, with dropout.

    The vocabulary has 98 + 1 ids and is padded to a multiple of 64 x TP.
    learning_rate: a constant one.
    settings: other fields of the configuration, by name. A topic may be given as a whole, and a
        text that is a path as a Path.
    """
    for topic in ("model", "training", "checkpoint", "data_parallel"):
        whole = settings.pop(topic, None) or {}
        settings |= whole if isinstance(whole, dict) else vars(whole)
    schedule = dict(lr=1e-2, lr_decay_style="cosine")
    if learning_rate is not None:
        schedule = dict(lr=learning_rate, lr_decay_style="constant")
    elif "train_samples" in settings:
        schedule["lr_warmup_samples"] = 12
    else:
        schedule |= dict(lr_warmup_iters=3, lr_decay_iters=20)
    shape = dict(num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16)
    batches = dict(micro_batch_size=1, global_batch_size=4, train_iters=20, eval_iters=1)
    data = dict(seq_length=16, mock_data=True, vocab_size=98, make_vocab_size_divisible_by=64)
    others = dict(
        tensor_model_parallel_size=tp_size,
        distributed_backend="gloo",
        log_interval=5,
        metrics_jsonl=metrics,
    )
    values = {**shape, **batches, **data, **others, **schedule, **settings}
    return run_config(**{key: str(x) if isinstance(x, Path) else x for key, x in values.items()})


def run_to_end(config):
    """Runs the config in this process. Returns the finished trainer.

    If a default group is initialised, this process is one of its ranks.
    """
    with parallel_state(config.parallel, seed=config.training.seed) as parallel:
        trainer = build_trainer(config, parallel)
        trainer.run()
    return trainer


def run_on_ranks(config, ranks, **options):
    """Runs the config on so many forked ranks."""
    run_ranks(lambda rank, world_size: run_to_end(config) and None, ranks, **options)


def with_checkpoint(config, **fields):
    """Returns the run's config with other --save and --load settings."""
    return replace(config, checkpoint=CheckpointConfig(**fields))


def rows(path):
    """Returns the rows of a metrics file without their timings."""
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMINGS}
        for line in path.read_text().splitlines()
    ]


def events_in(folder):
    """Returns what TensorBoard reads in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def step_bytes(root, iteration):
    """Returns the bytes of every tensor file of a checkpoint, by name."""
    return {
        path.name: path.read_bytes()
        for path in sorted((root / f"iter_{iteration:07d}").glob("*.safetensors"))
    }
