"""The MLP of a layer: split by columns, activated, split by rows."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.model.activations import squared_relu, swiglu, tanh_gelu
from megatron_lite.recompute.plan import ACTIVATION
from megatron_lite.recompute.regions import Regions
from megatron_lite.tensor_parallel.context import TensorParallelContext
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """[s/t under sequence parallelism else s, b, h] -> the same shape, through [s, b, f/t].

    With swiglu linear_fc1 computes [gate; up], 2f rows in two blocks, each split over the ranks.
    """

    def __init__(self, config: ModelConfig, context: TensorParallelContext) -> None:
        super().__init__()
        self.activation = config.activation
        self.tanh_gelu = config.bias_gelu_fusion
        blocks = 2 if config.activation == "swiglu" else 1
        self.linear_fc1 = ColumnParallelLinear(config.hidden_size, blocks * config.ffn_size, bias=config.add_bias_linear,
                                               init_std=config.init_method_std, context=context, tp_blocks=blocks)
        self.linear_fc2 = RowParallelLinear(config.ffn_size, config.hidden_size, bias=config.add_bias_linear,
                                            init_std=config.output_init_std, context=context)

    def forward(self, hidden_states: Tensor, regions: Regions, unread: bool = False) -> Tensor:
        """unread: nobody will read the values of the output."""
        activated = regions.lend(ACTIVATION, self._activate, self.linear_fc1(hidden_states))
        regions.enter_tail()
        return self.linear_fc2(activated, unread)

    def _activate(self, intermediate: Tensor) -> Tensor:
        if self.activation == "swiglu":
            return swiglu(intermediate)
        if self.activation == "squared_relu":
            return squared_relu(intermediate)
        return tanh_gelu(intermediate) if self.tanh_gelu else F.gelu(intermediate)
