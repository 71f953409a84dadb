"""The GPT language model, or one pipeline stage of it, sharded over the TP ranks, with Megatron's parameter names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.stages import Stage, whole_model
from megatron_lite.model.block import TransformerBlock
from megatron_lite.model.embedding import LanguageModelEmbedding, OutputEmbedding
from megatron_lite.model.rotary import RotaryTables, rotary_tables
from megatron_lite.parallel.chunks import select
from megatron_lite.parallel.parameter_spec import mark, spec_of
from megatron_lite.parallel.weights import weight_of
from megatron_lite.recompute.plan import RecomputePlan, keep_everything
from megatron_lite.tensor_parallel.column_linear import column_parallel_linear
from megatron_lite.tensor_parallel.context import TensorParallelContext
from megatron_lite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear
from megatron_lite.tensor_parallel.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from megatron_lite.tensor_parallel.mappings import gather_from_tensor_parallel_region


class GPTModel(nn.Module):
    """Parameters: embedding.*, decoder.layers.N.*, decoder.final_layernorm.*, and output_layer.weight where untied.

    Parameters start uninitialised: see tensor_parallel/initialize.py. vocab_size is the true V; the rows up to
    padded_vocab_size are zero, take no part in the loss and stay zero. plan: what backward rebuilds; nothing without it.
    stage: the part of the model that is here; its parameters have the names that they have in the whole model. A last stage with
    tied embeddings that is not the first holds a copy of embedding.word_embeddings.weight.
    loss_chunk_size: how many tokens have logits at a time while `loss` runs, forward and backward; all of them without it.
    """

    def __init__(self, config: ModelConfig, context: TensorParallelContext, *, vocab_size: int, padded_vocab_size: int,
                 plan: RecomputePlan | None = None, loss_chunk_size: int | None = None, stage: Stage | None = None) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.vocab_size = vocab_size
        self.loss_chunk_size = loss_chunk_size
        self.stage = stage = stage or whole_model(config.num_layers)
        untied = config.untie_embeddings_and_output_weights
        self.embedding: LanguageModelEmbedding | OutputEmbedding | None = None
        if stage.is_first:
            self.embedding = LanguageModelEmbedding(config, context, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size)
        elif stage.is_last and not untied:
            self.embedding = OutputEmbedding(config, context, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size)
        self.decoder = TransformerBlock(config, context, plan or keep_everything(stage.num_layers), stage)
        self.output_layer = ColumnParallelLinear(
            config.hidden_size, vocab_size, bias=False, init_std=config.init_method_std, context=context,
            padded_output_size=padded_vocab_size) if untied and stage.is_last else None
        if stage.count > 1 and not untied and self.embedding is not None:
            weight = self.embedding.word_embeddings.weight
            mark(weight, replace(spec_of(weight), tied=True, is_copy=not stage.is_first))
        columns = padded_vocab_size // context.size
        self.first_id = context.rank * columns
        self.num_ids = max(0, min(columns, vocab_size - self.first_id))
        self._rotary: RotaryTables | None = None

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Negative log-likelihood of each label, float32 [b, s]. tokens, labels: [b, s], or [b, s/c] of this rank's chunks.

        Of a whole model.
        """
        return self.losses(self.hidden_states(tokens), labels)

    def run_stage(self, inputs: Tensor, labels: Tensor | None, plan: RecomputePlan | None = None) -> Tensor:
        """What this stage makes of tokens or of what the stage before returned: hidden states, or on the last stage losses."""
        hidden_states = self.hidden_states(inputs, plan)
        return hidden_states if labels is None else self.losses(hidden_states, labels)

    def losses(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """The same from what the last layer and the norm behind it return. Of a last stage."""
        labels, group = labels.t(), self.context.group
        if self.loss_chunk_size is None:
            losses = vocab_parallel_cross_entropy(self._logits(hidden_states), labels, tp_group=group, first_id=self.first_id,
                                                  num_ids=self.num_ids)
        else:
            losses = self._project(partial(
                vocab_parallel_linear_cross_entropy, labels=labels, chunk_size=self.loss_chunk_size, tp_group=group,
                sequence_parallel=self.context.sequence_parallel, first_id=self.first_id, num_ids=self.num_ids), hidden_states)
        return losses.t()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [b, s, V] of every true id, gathered over the TP ranks (for evaluation and generation). tokens: [b, s]."""
        logits = gather_from_tensor_parallel_region(self._logits(self.hidden_states(tokens)), self.context.group)
        return logits[..., : self.vocab_size].transpose(0, 1)

    def constants(self) -> tuple[Tensor, ...]:
        """Tensors besides the parameters that outlive a step."""
        return self._rotary or ()

    def hidden_states(self, inputs: Tensor, plan: RecomputePlan | None = None) -> Tensor:
        """Through the stage: tokens [b, s], or what the stage before returned -> [s/t under sequence parallelism else s, b, h].

        plan: in place of the model's, for this micro-batch.
        """
        if isinstance(self.embedding, LanguageModelEmbedding):
            seq_length, hidden_states = inputs.shape[1], self.embedding(inputs)
        else:
            seq_length, hidden_states = inputs.shape[0] * (self.context.size if self.context.sequence_parallel else 1), inputs
        rotary = self._rotary_tables(seq_length) if self.config.position_embedding_type == "rope" else None
        return self.decoder(hidden_states, rotary, plan)

    def _logits(self, hidden_states: Tensor) -> Tensor:
        """-> [s, b, padded V / t]."""
        return self._project(partial(column_parallel_linear, bias=None, tp_group=self.context.group,
                                     sequence_parallel=self.context.sequence_parallel), hidden_states)

    def _project(self, function: Callable[[Tensor, Tensor], Tensor], hidden_states: Tensor) -> Tensor:
        """`function(hidden_states, weight)` with the output weight [padded V / t, h]."""
        if self.output_layer is not None:
            return self.output_layer(hidden_states, function)
        assert self.embedding is not None, self.stage
        return function(hidden_states, weight_of(self.embedding.word_embeddings))

    def _rotary_tables(self, seq_length: int) -> RotaryTables:
        """Of this rank's `seq_length` tokens. Built once per sequence length: they are constants of the model, not state."""
        if self._rotary is None or self._rotary.cos.shape[0] != seq_length:
            cp = self.context.cp
            whole = rotary_tables(cp.size * seq_length, self.config.rotary_dim, self.config.rotary_base,
                                  device=self.context.device, dtype=self.context.params_dtype)
            self._rotary = RotaryTables(*(select(table, cp.spans(seq_length), 0) for table in whole))
        return self._rotary
