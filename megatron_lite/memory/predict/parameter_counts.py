"""The numbers of parameters of a model and of one rank. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, stages_of_rank, whole_model
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.operations import Operation
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_kinds


def parameter_count(
    model: ModelConfig, vocab_size: int, *, tp_size: int = 1, stage: Stage | None = None
) -> int:
    """Returns how many parameters the whole model has, or one stage on one TP rank.

    vocab_size: the padded size if tp_size is above 1.
    Tied word embeddings count once. A last stage that is not the first holds a copy of them, which
    counts in that stage.
    """
    stage = stage or whole_model(model.num_layers)
    sizes = Sizes(
        micro_batch_size=1,
        seq_length=1,
        padded_vocab_size=vocab_size,
        tp_size=tp_size,
        has_embedding=stage.is_first,
        has_head=stage.is_last,
        first_layer=stage.first_layer,
    )
    ends = embedding_operations(model, sizes) + head_operations(model, sizes)
    return _elements(ends) + sum(
        count * _elements(layer.operations)
        for layer, count in describe_kinds(model, sizes, stage.num_layers)
    )


def rank_parameter_count(config: RunConfig, rank: int) -> int:
    """Returns how many parameters all stages of a pipeline rank have, on one TP rank.

    The vocabulary size must be known.
    """
    tp_size = config.parallel.tensor_model_parallel_size
    return sum(
        parameter_count(
            config.model, config.tokenizer.padded_vocab_size(tp_size), tp_size=tp_size, stage=stage
        )
        for stage in stages_of_rank(config.parallel, config.model.num_layers, rank)
    )


def _elements(operations: Iterable[Operation]) -> int:
    return sum(
        parameter.num_elements for operation in operations for parameter in operation.parameters
    )
