"""Small runs for tests of the planner."""

from megatron_lite.config.data_settings import DataConfig, TokenizerConfig
from megatron_lite.config.known_models import preset
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import TrainingConfig
from megatron_lite.plan.hardware import load_hardware

H100 = load_hardware("h100-80gb")


def small_run(*, layers=4, micro=1, batch=16, parallel=None, **model):
    """Returns a run of a GPT without dropout, whose layers share no tables."""
    fields = dict(
        num_layers=layers,
        hidden_size=1024,
        num_attention_heads=16,
        max_position_embeddings=1024,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return RunConfig(
        model=ModelConfig(**fields | model),
        training=TrainingConfig(micro_batch_size=micro, global_batch_size=batch, bf16=True),
        data=DataConfig(seq_length=1024),
        tokenizer=TokenizerConfig(vocab_size=1999),
        parallel=ParallelConfig(**(parallel or {})),
    )


def preset_run(name, *, seq_length, batch):
    """Returns a run of a preset in bfloat16, on one rank."""
    known = preset(name)
    return RunConfig(
        model=ModelConfig(**known.fields),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=batch, bf16=True),
        data=DataConfig(seq_length=seq_length),
        tokenizer=TokenizerConfig(vocab_size=known.vocab_size - 1),
    )
