"""RMSNorm of queries, or of keys, over the channels of all heads, which TP ranks split (OLMo 2).

With n channels in all, x and dy on one rank and sums over the ranks:

    forward   scale = rsqrt(sum x^2 / n + epsilon),  y = x scale w              one all-reduce
    backward  dx = scale (dy w - x scale sum(dy w x scale) / n)                 one all-reduce
              dw = sum over the tokens of dy x scale

Each all-reduce has one float32 number for each token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.tensor_parallel.layers import new_parameter
from megatron_lite.tensor_parallel.rank_context import RankContext


class AllHeadsNorm(nn.Module):
    """RMSNorm over all heads: [s, b, heads / t, d] -> the same shape.

    Weight [heads d], of which each rank has the part of its own heads.
    num_heads: the number of heads of all ranks.
    Keeps the input, one float32 number for each token and, under --apply-layernorm-1p, 1 + weight.
    Issues the collectives of the module's table.
    """

    def __init__(self, num_heads: int, config: ModelConfig, context: RankContext) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.shifts = config.apply_layernorm_1p
        self.group = context.group
        self.num_channels = num_heads * config.head_dim
        self.weight = new_parameter(
            ParameterSpec(
                global_shape=(self.num_channels,), tp_dim=0, init_value=0.0 if self.shifts else 1.0
            ),
            context,
        )

    def forward(self, heads: Tensor) -> Tensor:
        weight = (self.weight + 1 if self.shifts else self.weight).view(heads.shape[2:])
        return _NormalizeHeads.apply(heads, weight, self.num_channels, self.epsilon, self.group)


class _NormalizeHeads(torch.autograd.Function):
    """heads [s, b, heads / t, d] and weight [heads / t, d] -> the shape of heads.

    The module's docstring has the formulas and the collectives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        heads: Tensor,
        weight: Tensor,
        num_channels: int,
        epsilon: float,
        group: ProcessGroup | None,
    ) -> Tensor:
        dtype = torch.promote_types(heads.dtype, torch.float32)
        scale = all_reduce(heads.to(dtype).square().sum((2, 3), keepdim=True), group)
        # Out of place: a policy may keep the result of the all-reduce.
        scale = (scale / num_channels).add_(epsilon).rsqrt_()
        output = (heads * scale).mul_(weight).to(heads.dtype)
        ctx.num_channels, ctx.group = num_channels, group
        ctx.save_for_backward(heads, weight, scale)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        heads, weight, scale = ctx.saved_tensors
        wide = weight.to(scale.dtype)
        product = (heads * scale).mul_(grad_output)  # dy x scale
        grad_weight = product.sum((0, 1))
        # dx needs the sum over the heads of all ranks
        sums = all_reduce(product.mul_(wide).sum((2, 3), keepdim=True), ctx.group)
        del product
        grad_input = (
            (grad_output * wide)
            .sub_((heads * scale).mul_(sums / ctx.num_channels))
            .mul_(scale)
            .to(heads.dtype)
        )
        return grad_input, grad_weight.to(weight.dtype), None, None, None
