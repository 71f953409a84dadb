"""The GPT language model, or one pipeline stage of it, sharded over the TP ranks, with Megatron's
parameter names."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.config.stages import Stage, whole_model
from megatron_lite.context_parallel.attention_kernels import CuSeqlens
from megatron_lite.parallel.compiled import Tensors
from megatron_lite.parallel.parameter_spec import mark, spec_of
from megatron_lite.parallel.sequence_spans import select
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.weights import weight_of
from megatron_lite.recompute.recompute_plan import RecomputePlan, keep_everything
from megatron_lite.tensor_parallel.cross_entropy import Columns, vocab_parallel_cross_entropy
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, parallel_linear
from megatron_lite.tensor_parallel.mappings import gather_from_tensor_parallel_region
from megatron_lite.tensor_parallel.rank_context import RankContext

from .embedding import LanguageModelEmbedding
from .layer import TransformerBlock


class Documents(NamedTuple):
    """The places of a micro-batch's documents. A field is None if its flag is not given.

    position_ids: [b, s/c] int64, the place of each of this rank's tokens within its document
        (--reset-position-ids).
    cu_seqlens: the documents of the whole sequences (--reset-attention-mask). They are data of the
        micro-batch: no layer saves them for backward.
    """

    position_ids: Tensor | None = None
    cu_seqlens: CuSeqlens | None = None


NO_DOCUMENTS = Documents()


# Returns the incoming gradient of the token losses, [b, s], which backward will bring.
LossGradient = Callable[[], Tensor]


class GPTModel(nn.Module):
    """The whole GPT model, or the layers of one pipeline stage with its embedding and head.

    Parameters: embedding.*, decoder.layers.N.*, decoder.final_layernorm.*, and output_layer.weight
    if the embeddings are untied. They start uninitialised: see tensor_parallel/initialize.py.
    vocab_size: the true V. The rows of the weights from V up to padded_vocab_size are zero. They
        take no part in the loss, and they stay zero.
    plan: what backward rebuilds. Without a plan it rebuilds nothing.
    loss_chunk_size: how many tokens have logits at a time while `losses` runs, and in its
        backward. None: all of them.
    stage: the part of the model that this module holds. Its parameters keep the names of the whole
        model. A last stage with tied embeddings that is not the first stage holds a copy of
        embedding.word_embeddings.weight.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: RankContext,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        plan: RecomputePlan | None = None,
        loss_chunk_size: int | None = None,
        stage: Stage | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.context = context
        self.vocab_size = vocab_size
        self.loss_chunk_size = loss_chunk_size
        self.stage = stage = stage or whole_model(config.num_layers)
        untied = config.untie_embeddings_and_output_weights
        self.embedding: LanguageModelEmbedding | None = None
        if stage.is_first or (stage.is_last and not untied):
            self.embedding = LanguageModelEmbedding(
                config,
                context,
                vocab_size=vocab_size,
                padded_vocab_size=padded_vocab_size,
                has_positions=stage.is_first and config.learns_positions,
            )
        self.decoder = TransformerBlock(
            config, context, plan or keep_everything(stage.num_layers), stage
        )
        self.output_layer: ColumnParallelLinear | None = None
        if untied and stage.is_last:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                vocab_size,
                bias=False,
                init_std=config.init_method_std,
                context=context,
                padded_output_size=padded_vocab_size,
                matrices=(),
            )
        # Two stages hold a tied weight. The mark makes the optimizer add their gradients, and count
        # the weight only once in norms.
        if stage.count > 1 and not untied and self.embedding is not None:
            weight = self.embedding.word_embeddings.weight
            mark(weight, replace(spec_of(weight), tied=True, is_copy=not stage.is_first))
        # This rank's true ids. The padding is at the end of the vocabulary, so the last ranks may
        # have fewer ids than columns, or none.
        length = padded_vocab_size // context.tp_size
        first_id = context.tp_rank * length
        num_ids = max(0, min(length, vocab_size - first_id))
        cap = config.final_logit_softcapping
        self.columns = Columns(context.tp_group, first_id, num_ids, context.loss_kernels, cap)
        self._multiply = partial(
            parallel_linear,
            bias=None,
            tp_group=context.tp_group,
            sequence_parallel=context.sequence_parallel,
        )
        layers = range(stage.first_layer, stage.first_layer + stage.num_layers)
        self._rotates = any(map(config.layer_rotates, layers))
        self._rotary: Tensors | None = None

    def forward(
        self,
        inputs: Tensor,
        labels: Tensor | None = None,
        documents: Documents = NO_DOCUMENTS,
        gradient: LossGradient | None = None,
        plan: RecomputePlan | None = None,
    ) -> Tensor:
        """Runs this pipeline stage. Returns its hidden states; the last one has logits or losses.

        Without labels the last stage returns the logits [b, s, V] of every true id, which it
        gathers over the TP ranks; with them the loss of each token, the negative log-likelihood of
        its label, float32 [b, s].
        inputs: the tokens [b, s] on the first stage; on other stages the hidden states [s/t under
        sequence parallelism else s, b, h] that the stage before returned. labels: [b, s], given on
        the last stage only. Under context parallelism tokens, labels and losses are [b, s/c], this
        rank's spans.
        documents: the places of the documents in the sequences. gradient: see `losses`. plan:
        replaces the model's plan for this micro-batch.
        """
        hidden_states = inputs
        if self.stage.is_first and self.embedding is not None:
            hidden_states = self.embedding(inputs, documents.position_ids)
        shards = self.context.tp_size if self.context.sequence_parallel else 1
        seq_length = hidden_states.shape[0] * shards
        rotary = self.rotary_tables(seq_length) if self._rotates else None
        hidden_states = self.decoder(hidden_states, rotary, plan, documents.cu_seqlens)
        if labels is not None:
            return self.losses(hidden_states, labels, gradient)
        if not self.stage.is_last:
            return hidden_states
        own = self._project(self._multiply, hidden_states)
        if (cap := self.columns.cap) is not None:
            own = torch.tanh(own / cap) * cap
        logits = gather_from_tensor_parallel_region(own, self.context.tp_group)
        return logits[..., : self.vocab_size].transpose(0, 1)

    def losses(
        self, hidden_states: Tensor, labels: Tensor, gradient: LossGradient | None = None
    ) -> Tensor:
        """Returns the token losses [b, s] from the final hidden states (after final_layernorm).

        Only the last pipeline stage may call this.
        gradient: the incoming gradient of the losses. If it is given and the loss is in chunks,
            forward computes the gradients too, in one pass over the chunks. See `grad_losses` of
            vocab_parallel_linear_cross_entropy for what must hold.
        """
        labels = labels.t()
        if self.loss_chunk_size is None:
            # Nothing else reads the logits.
            logits = self._project(self._multiply, hidden_states)
            losses = vocab_parallel_cross_entropy(logits, labels, self.columns)
        else:
            from megatron_lite.tensor_parallel.linear_cross_entropy import (
                vocab_parallel_linear_cross_entropy,
            )

            losses = self._project(
                partial(
                    vocab_parallel_linear_cross_entropy,
                    labels=labels,
                    columns=self.columns,
                    loss_chunk_size=self.loss_chunk_size,
                    sequence_parallel=self.context.sequence_parallel,
                    grad_losses=None if gradient is None else lambda: gradient().t(),
                ),
                hidden_states,
            )
        return losses.t()

    def constants(self) -> Tensors:
        """Returns the tensors besides the parameters that outlive a step: the rotary tables."""
        return self._rotary or ()

    def _project(
        self, function: Callable[[Tensor, Tensor], Tensor], hidden_states: Tensor
    ) -> Tensor:
        """Returns `function(hidden_states, weight)` with the output weight [padded V / t, h]."""
        if self.config.logits_scaling != 1.0:  # no multiple of the logits, which are larger
            hidden_states = hidden_states / self.config.logits_scaling
        # FSDP2 and ZeRO-1 complete a module's weight before the module's forward. An output layer
        # is therefore called as a module. A tied weight is read with weight_of, which completes it.
        if self.output_layer is not None:
            return self.output_layer(hidden_states, function=function)
        assert self.embedding is not None, self.stage
        return function(hidden_states, weight_of(self.embedding.word_embeddings))

    def rotary_tables(self, seq_length: int) -> Tensors:
        """Returns the rotary tables of this rank's `seq_length` tokens, and after them those of
        layers with a window if they have their own.

        They are built once per sequence length. They are constants of the model, not state.
        """
        if self._rotary is None or self._rotary[0].shape[0] != seq_length:
            from .rotary import rotary_tables

            context, config = self.context, self.config
            tables = partial(
                rotary_tables,
                config,
                context.cp_size * seq_length,
                device=context.device,
                dtype=context.params_dtype,
            )
            whole: Tensors = tables()
            if config.rotary_base_local is not None:
                whole += tables(local_base=config.rotary_base_local)
            self._rotary = tuple(select(table, context.spans(seq_length), 0) for table in whole)
        return self._rotary


class ModelStages(nn.Module):
    """The model chunks of one pipeline rank, in the order of the model: one for each of its stages.

    Parameters have the names of the whole model. No two stages of a rank share a name.
    """

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)

    def __iter__(self) -> Iterator[GPTModel]:
        return iter(self.chunks)  # type: ignore[arg-type]

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for chunk in self.chunks:
            yield from chunk.named_parameters(*args, **options)

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        for chunk in self.chunks:
            yield from chunk.named_buffers(*args, **options)

    def constants(self) -> Tensors:
        """Returns the tensors besides the parameters that outlive a step."""
        return tuple(tensor for chunk in self for tensor in chunk.constants())


def shard_model_(model: GPTModel, parallel: ParallelState, config: DataParallelConfig) -> None:
    """Shards the model in place: this rank keeps its rows of every parameter.

    Does nothing without --use-torch-fsdp2, or without other data-parallel ranks. The rows of a
    16-bit model become float32, and FSDP2 gathers them in 16 bits. The rank holds the whole model
    until this call, so the weights must fit on it once.
    """
    if not config.use_torch_fsdp2 or parallel.shard_mesh is None:
        return
    from megatron_lite.parallel.fsdp import fully_shard_  # late: 0.6 s

    fully_shard_(model, parallel.shard_mesh, config)
