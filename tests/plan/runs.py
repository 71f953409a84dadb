"""Small runs for tests of the planner."""

from megatron_lite.api import run_config
from megatron_lite.plan.hardware import load_hardware

H100 = load_hardware("h100-80gb")


def small_run(*, layers=4, micro=1, batch=16, seq_length=1024, parallel=None, **settings):
    """Returns a run of a GPT without dropout, whose layers share no tables."""
    fields = dict(
        num_layers=layers,
        hidden_size=1024,
        num_attention_heads=16,
        max_position_embeddings=seq_length,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        micro_batch_size=micro,
        global_batch_size=batch,
        bf16=True,
        seq_length=seq_length,
        vocab_size=1999,
    )
    return run_config(**fields | (parallel or {}) | settings)


def preset_run(name, *, seq_length, batch):
    """Returns a run of a preset in bfloat16, on one rank."""
    return run_config(
        preset=name, micro_batch_size=1, global_batch_size=batch, bf16=True, seq_length=seq_length
    )
