"""Multi-latent attention (arXiv 2405.04434, section 2.1), with Megatron's parameter names.

    hidden states --q_down--> [s', b, rank] --norm--> q_up --+
    hidden states --kv_down-> [s', b, rank] --norm--> kv_up -+-> heads -> core attention -> proj
                     the rest [s', b, r] --------------------+

s' is s/t under sequence parallelism, else s. The down projections are whole on every TP rank, the
up projections are split by heads. Without q_lora_rank queries come from the hidden states
(linear_q_proj). The rotated channels of a head are pairs of neighbours in the weights, as in
Megatron and in DeepSeek's own: they are put in halves before they are rotated.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.regions import CORE_ATTENTION, UP_PROJECTION
from megatron_lite.context_parallel.attention_kernels import CuSeqlens
from megatron_lite.parallel.compiled import Pair, Tensors, applied
from megatron_lite.recompute.region_runner import Regions
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, ReplicatedLinear
from megatron_lite.tensor_parallel.mappings import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron_lite.tensor_parallel.rank_context import RankContext

from .attention import branch_end, core_attention
from .norm import Norm
from .rotary import rotate, rotate_back, turning


class LatentAttention(nn.Module):
    """Self-attention: [s/t under sequence parallelism else s, b, h] -> the same shape.

    layer: the layer's number in the whole model, counted from 0.
    """

    def __init__(self, config: ModelConfig, context: RankContext, layer: int) -> None:
        super().__init__()
        self.config, self.context = config, context
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
        up, down = (
            partial(kind, bias=False, init_std=config.init_method_std, context=context)
            for kind in (ColumnParallelLinear, ReplicatedLinear)
        )
        of_latents = config
        if config.latent_norm_epsilon is not None:
            of_latents = replace(config, norm_epsilon=config.latent_norm_epsilon)
        norm: Callable[[int], nn.Module] = nn.Identity
        if config.qk_layernorm:
            norm = partial(
                Norm, config=of_latents, context=context, partial_grad=context.sequence_parallel
            )
        if rank is None:
            self.linear_q_proj = up(hidden, heads * config.head_dim)
        else:
            self.linear_q_down_proj = down(hidden, rank)
            self.q_layernorm = norm(rank)
            self.linear_q_up_proj = up(rank, heads * config.head_dim)
        self.linear_kv_down_proj = down(hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = norm(config.kv_lora_rank)
        self.linear_kv_up_proj = up(
            config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim)
        )
        self.core_attention = core_attention(config, context, layer)
        self.linear_proj = branch_end(
            heads * config.v_head_dim, config, context, bias=config.has_proj_bias
        )

    def forward(
        self,
        hidden_states: Tensor,
        rotary: Tensors | None,
        regions: Regions,
        documents: CuSeqlens | None = None,
    ) -> Tensor:
        config, group = self.config, self.context.tp_group
        assert rotary is not None
        of_query = hidden_states
        if config.q_lora_rank is not None:
            of_query = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        latent, rotated = self.linear_kv_down_proj(hidden_states).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], -1
        )
        latent = self.kv_layernorm(latent)
        # Each rank's gradient covers its own heads.
        enter = (
            gather_from_sequence_parallel_region
            if self.context.sequence_parallel
            else copy_to_tensor_parallel_region
        )
        heads = regions.run_discarding(
            UP_PROJECTION, self._heads, of_query, latent, enter(rotated, group), rotary, outputs=3
        )
        return self.linear_proj(regions.run(CORE_ATTENTION, self.core_attention, *heads, documents))

    def _heads(self, of_query: Tensor, latent: Tensor, rotated: Tensor, rotary: Tensors) -> Tensors:
        """Returns query and key, [s, b, a/t, d] each, and value, [s, b, a/t, v_head_dim]."""
        of_rank = self.config.q_lora_rank is not None
        query = (self.linear_q_up_proj if of_rank else self.linear_q_proj)(of_query)
        key_value = self.linear_kv_up_proj(latent)
        pair = latent_heads(self.config.qk_head_dim)
        return applied(pair, query, key_value, rotated, *rotary, kernels=self.context.kernels)


def joined_heads(
    query: Tensor, key_value: Tensor, rotated: Tensor, cos: Tensor, sin: Tensor, *, fixed: int
) -> Tensors:
    """Returns query and key, [s, b, a/t, d] each, and value, all contiguous.

    query: [s, b, a/t d]. key_value: [s, b, a/t (fixed + v)]. rotated: [s, b, r], the rotated part
    of the keys of all heads. fixed: the channels of a head that are not rotated, d - r.
    """
    query = query.unflatten(-1, (-1, fixed + rotated.shape[-1]))
    key_value = key_value.unflatten(-1, (query.shape[2], -1))
    of_key = rotate(_halves(rotated.unsqueeze(2)), cos, sin).expand(-1, -1, query.shape[2], -1)
    of_query = rotate(_halves(query[..., fixed:]), cos, sin)
    return (
        torch.cat((query[..., :fixed], of_query), -1),
        torch.cat((key_value[..., :fixed], of_key), -1),
        key_value[..., fixed:].contiguous(),
    )


def split_back(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    fixed: int,
) -> Tensors:
    """Returns the gradients of the first three arguments of `joined_heads`."""
    of_query = _pairs(rotate_back(grad_query[..., fixed:], cos, sin))
    of_key = _pairs(rotate_back(grad_key[..., fixed:].sum(2, keepdim=True), cos, sin))
    return (
        torch.cat((grad_query[..., :fixed], of_query), -1).flatten(2),
        torch.cat((grad_key[..., :fixed], grad_value), -1).flatten(2),
        of_key.squeeze(2),
    )


@cache
def latent_heads(fixed: int) -> Pair:
    """Returns the pair of `joined_heads`."""
    return turning(partial(joined_heads, fixed=fixed), partial(split_back, fixed=fixed))


def _halves(pairs: Tensor) -> Tensor:
    """Returns the channels 0, 2, 4 .. 1, 3, 5 .. of each head."""
    return pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _pairs(halves: Tensor) -> Tensor:
    """Returns the channels of `_halves` in their first order."""
    return halves.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
