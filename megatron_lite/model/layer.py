"""One pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x)), dropout before
each addition."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.regions import LAYERNORM, MLP_REGION
from megatron_lite.model.attention import SelfAttention
from megatron_lite.model.dropout import add_dropped_out
from megatron_lite.model.mlp import MLP
from megatron_lite.model.norm import Norm
from megatron_lite.model.rotary import RotaryTables
from megatron_lite.recompute.region_runner import Regions
from megatron_lite.tensor_parallel.rank_context import RankContext


class TransformerLayer(nn.Module):
    """One transformer layer: [s/t under sequence parallelism else s, b, h] -> the same shape.

    number: the layer's number in the whole model, counted from 0.
    """

    def __init__(self, config: ModelConfig, context: RankContext, number: int) -> None:
        super().__init__()
        self.context = context
        self.hidden_dropout = config.hidden_dropout
        partial_grad = context.sequence_parallel
        self.input_layernorm = Norm(config.hidden_size, config, context, partial_grad=partial_grad)
        self.self_attention = SelfAttention(config, context, number)
        self.pre_mlp_layernorm = Norm(
            config.hidden_size, config, context, partial_grad=partial_grad
        )
        self.mlp = MLP(config, context)

    def forward(
        self,
        hidden_states: Tensor,
        rotary: RotaryTables | None,
        document_starts: Tensor | None,
        regions: Regions,
    ) -> Tensor:
        normed = regions.run_discarding(LAYERNORM, self.input_layernorm, hidden_states)
        hidden_states = self._add(
            hidden_states, self.self_attention(normed, rotary, regions, document_starts), regions
        )
        normed = regions.run_discarding(LAYERNORM, self.pre_mlp_layernorm, hidden_states)
        skip_tail = regions.skip_layer_tail
        branch = regions.run(MLP_REGION, self.mlp, normed, regions, skip_tail=skip_tail)
        return self._add(hidden_states, branch, regions, skip_tail=skip_tail)

    def _add(
        self, residual: Tensor, branch: Tensor, regions: Regions, *, skip_tail: bool = False
    ) -> Tensor:
        return add_dropped_out(
            residual,
            branch,
            self.hidden_dropout if self.training else 0.0,
            regions,
            self.context.residual_stream,
            skip_tail=skip_tail,
        )
