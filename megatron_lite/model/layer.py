"""One transformer layer, with dropout before each addition:

default                y = x + attention(norm(x)),  output = y + mlp(norm(y))
--parallel-residual    y = x + attention(norm(x)),  output = y + mlp(norm(x))
--norm-position after  y = x + norm(attention(x)),  output = y + norm(mlp(y))
"""

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
        self.context, self.residual_stream = context, context.residual_stream
        self.hidden_dropout = config.hidden_dropout
        self.parallel_residual = config.parallel_residual

        def norm(*, after: bool) -> Norm | None:
            if after != config.norms_after:
                return None
            return Norm(
                config.hidden_size,
                config,
                context,
                partial_grad=context.sequence_parallel,
                reads_residual=not after,
            )

        self.input_layernorm = norm(after=False)
        self.self_attention = SelfAttention(config, context, number)
        self.post_self_attn_layernorm = norm(after=True)
        self.pre_mlp_layernorm = norm(after=False)
        self.mlp = MLP(config, context)
        self.post_mlp_layernorm = norm(after=True)

    def forward(
        self,
        hidden_states: Tensor,
        rotary: RotaryTables | None,
        document_starts: Tensor | None,
        regions: Regions,
    ) -> Tensor:
        normed = hidden_states
        if self.input_layernorm is not None:
            normed = regions.run_discarding(LAYERNORM, self.input_layernorm, normed)
        branch = self.self_attention(normed, rotary, regions, document_starts)
        if self.post_self_attn_layernorm is not None:
            branch = self.post_self_attn_layernorm(branch)
        attended = self._add(hidden_states, branch, regions)
        del branch  # which would live on while the MLP runs
        normed = hidden_states if self.parallel_residual else attended
        if self.pre_mlp_layernorm is not None:
            normed = regions.run_discarding(LAYERNORM, self.pre_mlp_layernorm, normed)
        skip_tail = regions.skip_layer_tail
        branch = regions.run(MLP_REGION, self._mlp, normed, regions, skip_tail=skip_tail)
        return self._add(attended, branch, regions, skip_tail=skip_tail)

    def _mlp(self, hidden_states: Tensor, regions: Regions, skip_tail: bool) -> Tensor:
        """Runs the MLP and the norm after it. The norm's backward reads the output of the MLP.

        A replay can therefore leave out linear_fc2 only if no norm follows.
        """
        if self.post_mlp_layernorm is None:
            output: Tensor = self.mlp(hidden_states, regions, skip_tail)
            return output
        return self.post_mlp_layernorm(self.mlp(hidden_states, regions))

    def _add(
        self, residual: Tensor, branch: Tensor, regions: Regions, *, skip_tail: bool = False
    ) -> Tensor:
        return add_dropped_out(
            residual,
            branch,
            self.hidden_dropout if self.training else 0.0,
            regions,
            self.residual_stream,
            skip_tail=skip_tail,
            kernels=self.context.kernels,
        )
