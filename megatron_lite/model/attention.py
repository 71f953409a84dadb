"""Causal self-attention, with the heads split over the TP ranks by query group.

The output rows of linear_qkv are in Megatron's order, group by group: [q .. q k v][q .. q k v] ..
Each rank's rows are therefore whole groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.regions import CORE_ATTENTION
from megatron_lite.model.core_attention import CoreAttention
from megatron_lite.model.norm import Norm
from megatron_lite.model.rotary import RotaryTables, apply_rotary
from megatron_lite.recompute.region_runner import Regions
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lite.tensor_parallel.rank_context import RankContext


class SelfAttention(nn.Module):
    """Self-attention: [s/t under sequence parallelism else s, b, h] -> the same shape.

    Each rank computes a/t heads of the whole sequence. Under context parallelism s stands for s/c,
    the number of this rank's tokens (parallel/sequence_spans.py), as everywhere in the model.
    layer: the layer's number in the whole model, counted from 0. It decides whether attention has a
        window, and whether queries and keys are rotated.
    """

    def __init__(self, config: ModelConfig, context: RankContext, layer: int) -> None:
        super().__init__()
        self.config, self.head_dim = config, config.head_dim
        self.rotates = config.layer_rotates(layer)
        self.groups = config.query_groups // context.size
        self.queries_per_group = config.num_attention_heads // config.query_groups
        qkv_size = (config.num_attention_heads + 2 * config.query_groups) * config.head_dim
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            qkv_size,
            bias=config.add_bias_linear or config.add_qkv_bias,
            init_std=config.init_method_std,
            context=context,
            matrices=(self.queries_per_group * config.head_dim, config.head_dim, config.head_dim),
        )
        self.linear_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.add_bias_linear,
            init_std=config.output_init_std,
            context=context,
        )
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if config.norms_all_heads:
            self.q_layernorm, self.k_layernorm = (
                Norm(heads * config.head_dim, config, context, all_heads=True)
                for heads in (config.num_attention_heads, config.query_groups)
            )
        elif config.qk_layernorm:
            # One weight for all heads: each rank's gradient covers its own heads, with or without
            # sequence parallelism.
            self.q_layernorm, self.k_layernorm = (
                Norm(config.head_dim, config, context, partial_grad=True) for _ in range(2)
            )
        self.kernels = context.kernels
        self.core_attention = CoreAttention(
            config, context.rng, context.cp, layer=layer, kernels=context.kernels
        )

    def forward(
        self,
        hidden_states: Tensor,
        rotary: RotaryTables | None,
        regions: Regions,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        query, key, value = self._split_heads(self.linear_qkv(hidden_states))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self.rotates:
            assert rotary is not None
            query, key = (apply_rotary(heads, rotary, self.kernels) for heads in (query, key))
        return self.linear_proj(
            regions.run(CORE_ATTENTION, self.core_attention, query, key, value, document_starts)
        )

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the query [s, b, a/t, d], and the key and the value [s, b, g/t, d] each.

        If attention saves all three as they are, they are views of qkv, which costs one storage.
        Otherwise attention saves a copy of the query: a rotated one, one that an apex norm made
        contiguous, or one regrouped here. A saved view would then hold the whole storage of qkv
        beside that copy, so the tensors that nothing copies later become contiguous here.
        """
        query, key, value = _SplitHeads.apply(qkv, self.queries_per_group, self.head_dim)
        copied = self.config.norm_impl == "apex" if self.config.qk_layernorm else self.rotates
        if self.queries_per_group > 1:
            return query.contiguous(), key if copied else key.contiguous(), value.contiguous()
        return query, key, value.contiguous() if copied else value


class _SplitHeads(torch.autograd.Function):
    """[s, b, g/t (q + 2) d] -> query [s, b, g/t q, d], key and value [s, b, g/t, d]. Keeps nothing.

    The results are views, except for a query that has to be regrouped. Backward joins the three
    gradients in one pass. Autograd would write each of them into zeros as large as the input, and
    add these tensors up.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, queries_per_group: int, d: int) -> tuple[Tensor, ...]:
        ctx.queries_per_group = queries_per_group
        grouped = qkv.unflatten(-1, (-1, queries_per_group + 2, d))  # [s, b, g/t, q + 2, d]
        query, (key, value) = grouped[..., :-2, :], grouped[..., -2:, :].unbind(-2)
        return query.flatten(2, 3), key, value

    @staticmethod
    def backward(
        ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor
    ) -> tuple[Tensor, None, None]:
        queries = grad_query.unflatten(2, (-1, ctx.queries_per_group))  # [s, b, g/t, q, d]
        whole = torch.cat((queries, grad_key.unsqueeze(3), grad_value.unsqueeze(3)), 3)
        return whole.flatten(2), None, None
