"""Matrix-multiplication FLOPs of the model, as torch's FlopCounterMode counts them: 2 per multiply-add, attention over the
whole s x s square (a causal kernel may skip half of it), backward twice the forward. Standard library only."""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig


def forward_flops(model: ModelConfig, *, batch: int, seq_length: int, padded_vocab_size: int) -> int:
    """FLOPs of one forward pass of `batch` sequences over all TP ranks, logits included (2205.05198 appendix A)."""
    attention_width = model.num_attention_heads * model.head_dim
    qkv = 2 * model.hidden_size * (attention_width + 2 * model.query_groups * model.head_dim)
    core = 2 * 2 * seq_length * attention_width
    projection = 2 * attention_width * model.hidden_size
    mlp = 2 * model.hidden_size * model.ffn_size * (3 if model.activation == "swiglu" else 2)
    logits = 2 * model.hidden_size * padded_vocab_size
    return batch * seq_length * (model.num_layers * (qkv + core + projection + mlp) + logits)


def step_flops(model: ModelConfig, *, batch: int, seq_length: int, padded_vocab_size: int) -> int:
    """Model FLOPs of forward and backward over `batch` sequences, over all ranks, without recomputation."""
    return 3 * forward_flops(model, batch=batch, seq_length=seq_length, padded_vocab_size=padded_vocab_size)
