"""Token and position embeddings."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.sequence_spans import part_of
from megatron_lite.tensor_parallel.layers import VocabParallelEmbedding
from megatron_lite.tensor_parallel.rank_context import RankContext

from .dropout import dropout


def residual_dtype(config: ModelConfig, context: RankContext) -> torch.dtype:
    """Returns the dtype of the residual stream, in which stages also send it to each other."""
    if config.fp32_residual_connection:
        return torch.promote_types(context.params_dtype, torch.float32)
    return context.params_dtype


class PositionEmbedding(nn.Module):
    """Learned position embeddings: a weight [max_position_embeddings, h], whole on every rank.

    The forward returns [n, 1, h], the rows of positions [start, start + n). With position ids
    [b, s/c] it returns [n, b, h], the rows of the ids of tokens [start, start + n), and keeps the
    ids. Under sequence parallelism a rank adds only its own positions, so the gradient is summed
    over the TP ranks.
    """

    def __init__(self, config: ModelConfig, context: RankContext) -> None:
        super().__init__()
        self.weight = context.new_parameter(
            config.max_position_embeddings,
            config.hidden_size,
            init_std=config.init_method_std,
            sum_grad_over_tp=context.sequence_parallel,
        )

    def forward(self, start: int, length: int, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is not None:
            return F.embedding(position_ids.t().narrow(0, start, length), self.weight)
        return self.weight.narrow(0, start, length).unsqueeze(1)


class LanguageModelEmbedding(nn.Module):
    """Token ids [b, s] -> hidden states [s/t under sequence parallelism else s, b, h].

    The embedding adds the learned positions, if the model has them, and applies dropout.
    position_ids: [b, s/c], the positions of the tokens; None: their places in the sequence.

    The last pipeline stage has one too if the embeddings are tied, for the output projection, which
    reads its weight. Both stages' weights have the same name and initial values. They get the same
    gradient: the sum of the two stages' gradients.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: RankContext,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        has_positions: bool,
    ) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.residual_stream = context.residual_stream
        self.residual_dtype = residual_dtype(config, context)
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            padded_vocab_size=padded_vocab_size,
            init_std=config.init_method_std,
            context=context,
        )
        self.position_embeddings = PositionEmbedding(config, context) if has_positions else None
        multiplier = config.embedding_multiplier
        unit = torch.finfo(context.params_dtype).eps * 2.0 ** math.floor(math.log2(multiplier))
        self.multiplier = round(multiplier / unit) * unit  # as a weight rounds it

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        hidden_states = self.word_embeddings(tokens)
        if self.multiplier != 1.0:
            hidden_states = hidden_states * self.multiplier
        if self.position_embeddings is not None:
            # Under sequence parallelism this rank's tokens are the rank-th part of the spans'
            # tokens. Context parallelism may give a rank two separate stretches of the sequence.
            context, length = self.context, hidden_states.shape[0]
            start, shards = (
                (context.tp_rank * length, context.tp_size) if context.sequence_parallel else (0, 1)
            )
            if position_ids is not None or context.cp_size == 1:
                positions = self.position_embeddings(start, length, position_ids)
            else:
                stretches = [
                    self.position_embeddings(span.start, span.stop - span.start)
                    for span in part_of(context.spans(shards * length), start, length)
                ]
                positions = stretches[0] if len(stretches) == 1 else torch.cat(stretches)
            hidden_states = hidden_states + positions
        return dropout(
            hidden_states.to(self.residual_dtype),
            self.config.hidden_dropout if self.training else 0.0,
            self.context.rng,
            self.residual_stream,
            self.context.kernels,
        )
