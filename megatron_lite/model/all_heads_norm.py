"""RMSNorm of queries, or of keys, over the channels of all heads, which TP ranks split (OLMo 2).

With n channels in all, x and dy on one rank and sums over the ranks:

    forward   scale = rsqrt(sum x^2 / n + epsilon),  y = x scale w              one all-reduce
    backward  dx = scale (dy w - x scale sum(dy w x scale) / n)                 one all-reduce
              dw = sum over the tokens of dy x scale

Each all-reduce has one float32 number for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.config.model import ModelConfig
from megatron_lite.model.cpu_blocks import elements_at_a_time
from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.parallel.fake_tensors import unlike_parts
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
        scale = heads.new_empty((*heads.shape[:2], 1, 1), dtype=dtype)
        blocks = _blocks(heads)
        for block in blocks:
            scale[block] = heads[block].to(dtype).square().sum((2, 3), keepdim=True)
        # Out of place: a policy may keep the result of the all-reduce.
        scale = all_reduce(scale, group)
        scale = (scale / num_channels).add_(epsilon).rsqrt_()
        output = torch.empty_like(heads, memory_format=torch.contiguous_format)
        for block in blocks:
            output[block] = (heads[block] * scale[block]).mul_(weight)
        ctx.num_channels, ctx.group = num_channels, group
        ctx.save_for_backward(heads, weight, scale)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        heads, weight, scale = ctx.saved_tensors
        wide = weight.to(scale.dtype)
        grad_weight, means = torch.zeros_like(wide), torch.empty_like(scale)
        # Two passes over the blocks: dx needs the sum over the heads of all ranks.
        blocks = _blocks(heads)
        for block in blocks:
            means[block] = _products(
                heads[block], grad_output[block], scale[block], wide, grad_weight
            )
        means = all_reduce(means, ctx.group)
        means = means / ctx.num_channels
        grad_input = torch.empty_like(heads, memory_format=torch.contiguous_format)
        for block in blocks:
            grad_input[block] = (
                (grad_output[block] * wide)
                .sub_((heads[block] * scale[block]).mul_(means[block]))
                .mul_(scale[block])
            )
        return grad_input, grad_weight.to(weight.dtype), None, None, None


def _products(
    heads: Tensor, grad_output: Tensor, scale: Tensor, weight: Tensor, grad_weight: Tensor
) -> Tensor:
    """Adds a block's part to grad_weight. Returns the sum of dy w x scale of each token."""
    product = (heads * scale).mul_(grad_output)
    grad_weight += product.sum((0, 1))
    return product.mul_(weight).sum((2, 3), keepdim=True)


def _blocks(heads: Tensor) -> Sequence[slice]:
    """Returns ranges of positions. On a CPU the float32 copies of a block stay in the cache."""
    length = heads.shape[0]
    step = length
    if heads.device.type == "cpu":
        step = max(1, elements_at_a_time() // max(1, heads[0].numel()))
    parts = [slice(start, start + step) for start in range(0, length, step)]
    return unlike_parts(parts, heads)
