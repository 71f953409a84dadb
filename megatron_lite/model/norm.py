"""LayerNorm and RMSNorm over the last dim."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.tensor_parallel.context import TensorParallelContext
from megatron_lite.tensor_parallel.layers import new_parameter


class Norm(nn.Module):
    """[..., n] -> [..., n]. Weight [n], and for LayerNorm bias [n], whole on every TP rank.

    partial_grad: each TP rank sees other tokens (sequence parallelism) or other heads (qk-layernorm), so that the
    parameter's gradient is the sum over the ranks. Keeps the input and its statistics.
    """

    def __init__(self, size: int, config: ModelConfig, context: TensorParallelContext, *, partial_grad: bool) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.weight = new_parameter(ParameterSpec(global_shape=(size,), init_value=1.0, sum_grad_over_tp=partial_grad), context)
        self.bias = new_parameter(ParameterSpec(global_shape=(size,), sum_grad_over_tp=partial_grad),
                                  context) if config.normalization == "LayerNorm" else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.epsilon)
        return F.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, self.epsilon)
