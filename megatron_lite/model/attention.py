"""Causal self-attention: heads split over the TP ranks, by query group.

linear_qkv's output rows are Megatron's, group by group: [q .. q k v][q .. q k v] .., so that a rank's rows are whole groups.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.context_parallel.attention import context_parallel_attention
from megatron_lite.context_parallel.kernels import has_kernel
from megatron_lite.model.dropout import dropout
from megatron_lite.model.norm import Norm
from megatron_lite.model.rotary import RotaryTables, apply_rotary
from megatron_lite.parallel.chunks import ContextParallel
from megatron_lite.parallel.rng import TENSOR_PARALLEL, RngStreams
from megatron_lite.recompute.plan import CORE_ATTENTION
from megatron_lite.recompute.regions import Regions
from megatron_lite.tensor_parallel.context import TensorParallelContext
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lite.tensor_parallel.mappings import gather_from_sequence_parallel_region


class SelfAttention(nn.Module):
    """[s/t under sequence parallelism else s, b, h] -> the same shape. Each rank computes a/t heads of the whole sequence.

    Under context parallelism s is s/c here, this rank's tokens (parallel/chunks.py), as everywhere in the model.
    """

    def __init__(self, config: ModelConfig, context: TensorParallelContext) -> None:
        super().__init__()
        self.config = config
        self.groups = config.query_groups // context.size
        self.queries_per_group = config.num_attention_heads // config.query_groups
        qkv_size = (config.num_attention_heads + 2 * config.query_groups) * config.head_dim
        self.linear_qkv = ColumnParallelLinear(config.hidden_size, qkv_size, bias=config.add_bias_linear or config.add_qkv_bias,
                                               init_std=config.init_method_std, context=context)
        self.linear_proj = RowParallelLinear(config.num_attention_heads * config.head_dim, config.hidden_size,
                                             bias=config.add_bias_linear, init_std=config.output_init_std, context=context)
        # One weight for all heads: each rank's gradient covers its own heads, with or without sequence parallelism.
        self.q_layernorm = Norm(config.head_dim, config, context, partial_grad=True) if config.qk_layernorm else None
        self.k_layernorm = Norm(config.head_dim, config, context, partial_grad=True) if config.qk_layernorm else None
        self.core_attention = CoreAttention(config, context.rng, context.cp)

    def forward(self, hidden_states: Tensor, rotary: RotaryTables | None, regions: Regions) -> Tensor:
        query, key, value = self._split_heads(self.linear_qkv(hidden_states))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotary is not None:
            query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)
        return self.linear_proj(regions.run(CORE_ATTENTION, self.core_attention, query, key, value))

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, a/t, d] and twice [s, b, g/t, d]: views of qkv where all three are kept as they are.

        Where another copy of the query will be kept (rotated, or regrouped here), a view would hold the whole of qkv too.
        """
        s, b, _ = qkv.shape
        q, d = self.queries_per_group, self.config.head_dim
        grouped = qkv.view(s, b, self.groups, q + 2, d)
        query, key, value = grouped[..., :q, :].reshape(s, b, self.groups * q, d), grouped[..., q, :], grouped[..., q + 1, :]
        copied = self.config.position_embedding_type == "rope" and not self.config.qk_layernorm
        if q > 1:
            return query.contiguous(), key if copied else key.contiguous(), value.contiguous()
        return query, key, value.contiguous() if copied else value


class CoreAttention(nn.Module):
    """query [s, b, a/t, d], key and value [s, b, g/t, d] -> [s, b, a/t * d]. No parameters; collectives on cp.group alone.

    "flash" is torch's scaled_dot_product_attention, with whichever kernel torch picks for the device: flash kernels keep their
    inputs, their output and one float32 per row. "unfused" builds the scores and keeps, for each of a/t * s^2 * b of them, the
    softmax in the scores' dtype and, with dropout, its mask (1 byte) and the dropped softmax; under --attention-softmax-in-fp32
    the float32 softmax besides a bf16 one; with query groups, key and value repeated for every head. "auto" is flash. With
    dropout on a CPU both are unfused: torch has no flash kernel for it, and would build the scores itself.
    Under context parallelism (s is s/c): flash keeps the same of this rank's tokens; unfused gathers keys and values, keeps them
    whole, and scores of a/t * s/c * s * b; and dropout, and what no kernel takes, is unfused on every device.
    """

    def __init__(self, config: ModelConfig, rng: RngStreams, cp: ContextParallel | None = None) -> None:
        super().__init__()
        self.backend = config.attention_backend
        self.dropout = config.attention_dropout
        self.softmax_in_fp32 = config.attention_softmax_in_fp32
        self.scale = config.head_dim**-0.5
        self.rng = rng
        self.cp = cp or ContextParallel()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, unread: bool = False) -> Tensor:
        """unread: nobody will read the values of the output; unfused attention then leaves out its last matmul."""
        dropout_p = self.dropout if self.training else 0.0
        if self.backend == "unfused" or (dropout_p > 0.0 and query.device.type == "cpu"):
            return self._unfused(query, key, value, dropout_p, unread)
        if self.cp.group is None:
            return self._flash(query, key, value, dropout_p)
        if dropout_p > 0.0 or not has_kernel(query):
            return self._unfused(query, key, value, dropout_p, unread)
        return context_parallel_attention(query, key, value, cp=self.cp, scale=self.scale).flatten(2)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
        with self.rng.fork(TENSOR_PARALLEL) if dropout_p > 0.0 else nullcontext():
            attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=True, scale=self.scale,
                                                     enable_gqa=query.shape[1] != key.shape[1])
        return attended.permute(2, 0, 1, 3).flatten(2)

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, unread: bool) -> Tensor:
        s, b, heads, _ = query.shape
        future = self._future(query)
        if self.cp.group is not None:  # one gather for both: [s, 2, b, g/t, d]
            key, value = gather_from_sequence_parallel_region(torch.stack((key, value), 1), self.cp.group).unbind(1)
        if heads > key.shape[2]:
            key, value = (x.repeat_interleave(heads // x.shape[2], 2) for x in (key, value))
        query, key, value = (x.flatten(1, 2).transpose(0, 1) for x in (query, key, value))  # [b a/t, s, d]
        scores = torch.baddbmm(future, query, key.transpose(1, 2), alpha=self.scale)  # [b a/t, s, s]
        dtype = torch.float32 if self.softmax_in_fp32 and scores.dtype != torch.float64 else scores.dtype
        weights = F.softmax(scores, dim=-1, dtype=dtype).to(value.dtype)
        attended = weighted_sum(dropout(weights, dropout_p, self.rng, TENSOR_PARALLEL), value, unread=unread)
        return attended.transpose(0, 1).reshape(s, b, -1)

    def _future(self, query: Tensor) -> Tensor:
        """-inf where a key stands after the query, else 0: [s, s], under context parallelism [s/c, s] in the order of a gather.

        Added to the scores; has no gradient and keeps none.
        """
        s = query.shape[0]
        if self.cp.group is None:
            return query.new_full((s, s), -torch.inf).triu_(1)
        positions = self.cp.positions_by_rank(s, query.device)
        later = positions.flatten() > positions[self.cp.rank].unsqueeze(1)
        return query.new_zeros(later.shape).masked_fill_(later, -torch.inf)


def weighted_sum(weights: Tensor, value: Tensor, *, unread: bool = False) -> Tensor:
    """[n, s, m] x [n, m, d] -> [n, s, d]. Keeps both. unread: without the matmul; the values are anything."""
    return _WeightedSum.apply(weights, value, unread)


class _WeightedSum(torch.autograd.Function):
    """torch.bmm, whose forward can be left out."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, unread: bool) -> Tensor:
        ctx.save_for_backward(weights, value)
        if unread:
            return value.new_empty(()).expand(*weights.shape[:-1], value.shape[-1])
        return torch.bmm(weights, value)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, value = ctx.saved_tensors
        return torch.bmm(grad_output, value.transpose(1, 2)), torch.bmm(weights.transpose(1, 2), grad_output), None
