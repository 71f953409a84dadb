"""The MLP of a layer: two linear layers with an activation between them."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.regions import ACTIVATION
from megatron_lite.model.activations import activation_function, adds_bias
from megatron_lite.model.attention import branch_skips_bias
from megatron_lite.recompute.region_runner import Regions
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lite.tensor_parallel.rank_context import RankContext


class MLP(nn.Module):
    """The MLP: [s/t under sequence parallelism else s, b, h] -> the same shape.

    The activation's output is [s, b, f/t]. With a gated activation linear_fc1 computes [gate; up].
    Its 2f rows form two blocks, and each block is split over the TP ranks.
    ffn_size: f, if it is not the model's.
    activation: the region of the activation.
    output_is_read: whether backward reads the output, or the layer has operations after it.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: RankContext,
        *,
        ffn_size: int | None = None,
        activation: str = ACTIVATION,
        output_is_read: bool,
    ) -> None:
        super().__init__()
        ffn_size = ffn_size or config.ffn_size
        self.activation_region = activation
        self.activation = activation_function(config, context.kernels)
        self.output_is_read = output_is_read
        blocks = config.fc1_blocks
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            blocks * ffn_size,
            bias=config.add_bias_linear,
            init_std=config.init_method_std,
            context=context,
            tp_blocks=blocks,
            skip_bias_add=adds_bias(config, context.kernels),
        )
        self.linear_fc2 = RowParallelLinear(
            ffn_size,
            config.hidden_size,
            bias=config.add_bias_linear,
            init_std=config.output_init_std,
            context=context,
            skip_bias_add=branch_skips_bias(config, context),
        )

    def forward(self, hidden_states: Tensor, regions: Regions, skip_tail: bool = False) -> Tensor:
        """Runs the MLP. skip_tail: the output's values are never read; linear_fc2 is skipped."""
        activated = regions.run_discarding(
            self.activation_region, self._activate, self.linear_fc1(hidden_states)
        )
        if not self.output_is_read:
            regions.enter_tail()
        return self.linear_fc2(activated, skip_tail)

    def _activate(self, intermediate: Tensor) -> Tensor:
        if self.linear_fc1.skipped_bias is None:
            return self.activation(intermediate)
        return self.activation(intermediate, self.linear_fc1.skipped_bias)
