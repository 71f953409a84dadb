"""How many parameters a model has, and how many one rank holds. Standard library only."""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, stages_of_rank, whole_model


def parameter_count(model: ModelConfig, vocab_size: int, *, tp_size: int = 1, stage: Stage | None = None) -> int:
    """Of the whole model, or of one stage on one TP rank, where `vocab_size` is the padded one.

    Tied word embeddings count once, but a last stage that is not the first holds a copy of them.
    """
    stage = stage or whole_model(model.num_layers)
    hidden = model.hidden_size
    words = vocab_size * hidden // tp_size
    count = stage.num_layers * _layer_count(model, tp_size)
    if stage.is_first:
        count += words + (model.max_position_embeddings * hidden if model.position_embedding_type == "learned_absolute" else 0)
    if stage.is_last:
        count += _norm_count(model, hidden)
        count += words if model.untie_embeddings_and_output_weights or not stage.is_first else 0
    return count


def rank_parameter_count(config: RunConfig, rank: int) -> int:
    """Of all stages of a pipeline rank, on one TP rank. The vocabulary must be known."""
    tp_size = config.parallel.tensor_model_parallel_size
    return sum(parameter_count(config.model, config.tokenizer.padded_vocab_size(tp_size), tp_size=tp_size, stage=stage)
               for stage in stages_of_rank(config.parallel, config.model.num_layers, rank))


def _layer_count(model: ModelConfig, tp_size: int) -> int:
    hidden = model.hidden_size
    heads, groups = model.num_attention_heads * model.head_dim, model.query_groups * model.head_dim
    qkv, fc1 = heads + 2 * groups, model.ffn_size * (2 if model.activation == "swiglu" else 1)
    sharded = (qkv + heads + fc1 + model.ffn_size) * hidden
    sharded += qkv if model.add_bias_linear or model.add_qkv_bias else 0
    sharded += fc1 if model.add_bias_linear else 0
    whole = 2 * _norm_count(model, hidden) + (2 * hidden if model.add_bias_linear else 0)  # linear_proj, linear_fc2: their bias
    return sharded // tp_size + whole + (2 * _norm_count(model, model.head_dim) if model.qk_layernorm else 0)


def _norm_count(model: ModelConfig, width: int) -> int:
    return width if model.normalization == "RMSNorm" else 2 * width
