"""Causal self-attention, with the heads split over the TP ranks by query group.

The output rows of linear_qkv are in Megatron's order, group by group: [q .. q k v][q .. q k v] ..
Each rank's rows are therefore whole groups.

torch's kernels for whole sequences know neither windows nor the documents of
--reset-attention-mask. For a window they take a mask of s x s elements, which autograd would keep
for backward. fused_attention.py builds it again instead. Documents are lists of where they end. A
layer with windows or documents therefore keeps the same tensors as a layer without.

    device         kernel, forward and backward            a window          documents
    CPU            _scaled_dot_product_flash_attention     a mask            one after the other
                   _for_cpu
    CUDA           _scaled_dot_product_efficient           a mask            one after the other
                   _attention
    CUDA, 16 bits  _flash_attention_forward, which         by the kernel     by the kernel
                   torch's varlen_attn calls
"""

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.config.layer_pattern import reach
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.parallel import exchange_of
from megatron_lite.config.regions import CORE_ATTENTION
from megatron_lite.context_parallel.attention_kernels import (
    PLAIN,
    CuSeqlens,
    Readable,
    causal_mask,
    has_kernel,
    heads_first,
    heads_last,
    kernel_context,
    suits_torch,
)
from megatron_lite.parallel.compiled import Kernels, Pair, Tensors, applied, at_least_float32
from megatron_lite.parallel.rng import TENSOR_PARALLEL, RngStreams
from megatron_lite.recompute.region_runner import Regions
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lite.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron_lite.tensor_parallel.rank_context import RankContext

from .dropout import dropout
from .norm import Norm


def branch_end(
    size: int, config: ModelConfig, context: RankContext, *, bias: bool
) -> RowParallelLinear:
    """Returns the last linear layer of a branch, [.., size / t] -> [.., h].

    With compiled kernels the kernel that adds a branch to the residual adds this layer's bias,
    unless there is a norm or a factor in between, which needs the sum.
    """
    return RowParallelLinear(
        size,
        config.hidden_size,
        bias=bias,
        init_std=config.output_init_std,
        context=context,
        skip_bias_add=context.kernels is not None and not config.changes_branches,
    )


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
        self.is_local = config.layer_is_local(layer)
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
        self.linear_proj = branch_end(
            config.num_attention_heads * config.head_dim, config, context, bias=config.has_proj_bias
        )
        self.q_layernorm: Norm | None = None
        self.k_layernorm: Norm | None = None
        if config.norms_all_heads:
            self.q_layernorm, self.k_layernorm = (
                Norm(heads * config.head_dim, config, context, all_heads=True)
                for heads in (config.num_attention_heads, config.query_groups)
            )
        elif config.qk_layernorm:
            also = None
            if self.rotates:
                from .rotary import rotating

                also = rotating
            # One weight for all heads: each rank's gradient covers its own heads, with or without
            # sequence parallelism.
            self.q_layernorm, self.k_layernorm = (
                Norm(config.head_dim, config, context, partial_grad=True, also=also)
                for _ in range(2)
            )
        self.kernels = context.kernels
        self.core_attention = core_attention(config, context, layer)

    def forward(
        self,
        hidden_states: Tensor,
        rotary: Tensors | None,
        regions: Regions,
        documents: CuSeqlens | None = None,
    ) -> Tensor:
        qkv, rotates, tables = self.linear_qkv(hidden_states), self.rotates, Tensors()
        if rotates:
            from .rotary import ROTATION, rotated_heads

            assert rotary is not None
            tables = rotary[2:] if self.is_local else rotary[:2]
        if self.kernels is not None and rotates and self.q_layernorm is None:
            pair = rotated_heads(self.queries_per_group, self.head_dim)
            query, key, value = applied(pair, qkv, *tables, kernels=self.kernels)
            rotates = False
        else:
            query, key, value = self._split_heads(qkv)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            also = tables if self.q_layernorm.does_more else ()
            query, key = self.q_layernorm(query, *also), self.k_layernorm(key, *also)
            rotates = rotates and not also
        if rotates:
            rotate = partial(applied, ROTATION, kernels=self.kernels)
            query, key = rotate(query, *tables), rotate(key, *tables)
        query = query.flatten(2, -2)
        return self.linear_proj(
            regions.run(CORE_ATTENTION, self.core_attention, query, key, value, documents)
        )

    def _split_heads(self, qkv: Tensor) -> Tensors:
        """Returns the query [s, b, a/t, d], and the key and the value [s, b, g/t, d] each.

        If attention saves all three as they are, they are views of qkv, which costs one storage.
        Otherwise attention saves a copy of the query: a rotated one, or one regrouped here. A saved
        view would then hold the whole storage of qkv beside that copy, so the tensors that nothing
        copies later become contiguous here.

        Compiled kernels regroup the query as they norm it, which is then a view
        [s, b, g/t, a/g, d]. They save views of qkv, so the value stays one. Without norms they do
        all at once (`rotated_heads` in rotary.py).
        """
        config = self.config
        normed = config.qk_layernorm and not config.norms_all_heads
        regroups = self.kernels is not None and normed
        query, key, value = applied(
            SPLIT_HEADS, qkv, queries=self.queries_per_group, d=self.head_dim, is_view=regroups
        )
        if regroups:
            return query, key, value
        copied = self.rotates and not config.qk_layernorm
        if self.queries_per_group > 1:
            return query.contiguous(), key if copied else key.contiguous(), value.contiguous()
        return query, key, value.contiguous() if copied else value


def split_heads(qkv: Tensor, *, queries: int, d: int, is_view: bool) -> Tensors:
    """Returns query [s, b, g/t q, d], key and value [s, b, g/t, d] of qkv [s, b, g/t (q + 2) d].

    The results are views, except for a query that has to be regrouped. If something else regroups
    it, the query is a view [s, b, g/t, q, d].
    """
    grouped = qkv.unflatten(-1, (-1, queries + 2, d))  # [s, b, g/t, q + 2, d]
    query, (key, value) = grouped[..., :-2, :], grouped[..., -2:, :].unbind(-2)
    return query if is_view else query.flatten(2, 3), key, value


def join_heads(grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> Tensor:
    """Returns the gradient of qkv, from the three gradients in one pass.

    Autograd would write each of them into zeros as large as the input, and add these tensors up.
    """
    # of 4 dimensions, which CUDA joins in one launch: [s, b, g/t, q d]
    queries = grad_query.reshape(*grad_key.shape[:3], -1)
    return torch.cat((queries, grad_key, grad_value), -1).flatten(2)


SPLIT_HEADS = Pair(split_heads, join_heads, slice(0), outputs=3)


def core_attention(config: ModelConfig, context: RankContext, layer: int) -> nn.Module:
    """Returns the attention of a layer, with the exchanges of its context-parallel ranks."""
    group, exchange = context.cp_group, exchange_of(context.cp_comm_type, layer)
    attention = partial(CoreAttention, config, context.rng, layer=layer, kernels=context.kernels)
    if group is None or exchange != "a2a":
        return attention(group, exchange)
    # late: few runs have it
    from .dispatch import HeadExchange

    return HeadExchange(attention(), group)


class CoreAttention(nn.Module):
    """Attention itself: query [s, b, a/t, d], key and value [s, b, g/t, d] -> [s, b, a/t * d].

    It has no parameters, and issues collectives on `cp_group` alone.

    "auto" is torch's scaled_dot_product_attention, with the kernel that torch picks for the device.
    "flash" is FlashAttention on CUDA, and its form for float32, torch's memory-efficient kernel.
    "fused" is cuDNN's kernel on CUDA. On a CPU all three are torch's flash kernel. They keep their
    inputs, their output and one float32 per row. Masks go to the kernels of the table above.

    "unfused" builds a/t * s^2 * b scores. For each score it keeps the softmax in the scores' dtype.
    With dropout it also keeps the mask (1 byte) and the dropped softmax. Under
    --attention-softmax-in-fp32 it keeps the float32 softmax beside a 16-bit one. With query groups
    it keeps key and value repeated for every head. With a cap it is unfused on every device, and
    keeps the tanh of each score too.

    With dropout on a CPU both are unfused: torch has no flash kernel for that case, and would build
    the scores itself.

    Under context parallelism s stands for s/c. Flash keeps the same tensors of this rank's tokens.
    Unfused attention gathers keys and values, keeps them whole, and builds a/t * s/c * s * b
    scores. Context-parallel attention with dropout, with a window, or of shapes that no kernel
    takes is unfused on every device.

    With documents a query reads no key of an earlier one. Flash attention keeps what it keeps
    without them. Attention that builds its scores, and torch's own with dropout on CUDA, get a mask
    [b, 1, s, s]. Unfused attention copies it for every head, if there are several samples.

    layer: the layer's number in the whole model, counted from 0. It decides whether attention has a
    window. A window adds nothing to the kept bytes, with one exception. Unfused attention adds the
    mask to its scores, which keeps no mask, and flash attention builds its mask [s, s] again in
    backward (model/attention.py). The exception is torch's own attention with a mask, which
    runs with dropout on CUDA and for shapes that no CUDA kernel of fused_attention.py takes. In
    that case each layer with a window keeps a mask of its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        rng: RngStreams,
        cp_group: ProcessGroup | None = None,
        exchange: str = "p2p",
        *,
        layer: int,
        kernels: Kernels = None,
    ) -> None:
        super().__init__()
        self.config, self.window = config, config.layer_window(layer)
        # the context in which torch's causal attention without a mask picks its kernel
        self.kernel = kernel_context(config.attention_backend, rng.device)
        self.is_flash = config.attention_backend == "flash" and self.kernel is not nullcontext
        self.always_unfused = config.always_unfused
        self.builds_scores = config.builds_scores(rng.device.type)
        self.scale = config.attention_scale
        self.cap = config.attn_logit_softcapping
        self.rng = rng
        self.kernels = kernels
        self.cp_group, self.cp_size = cp_group, 1
        if cp_group is not None:
            # Imported late: only context parallelism needs it.
            from megatron_lite.context_parallel import sharded_attention

            self.cp_size = cp_group.size()
            self.sharded = partial(
                sharded_attention.context_parallel_attention,
                group=cp_group,
                comm_type=exchange,
                scale=self.scale,
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: CuSeqlens | None = None,
        skip_tail: bool = False,
    ) -> Tensor:
        """Runs attention.

        documents: those of the whole sequences. A query reads no key of an earlier document.
        skip_tail: the output's values are never read. Unfused attention then skips its last matmul.
            Flash attention, one kernel, skips nothing.
        """
        dropout_p = self.config.attention_dropout if self.training else 0.0
        length = query.shape[0] * self.cp_size
        window = None if self.window is None else reach(self.window, length)
        readable = Readable(window, documents)
        sharded = self.cp_group is not None
        ours = dropout_p == 0.0 and has_kernel(query)  # our own Functions of torch's kernels
        if (
            self.always_unfused
            or (dropout_p > 0.0 and self.builds_scores)
            or (sharded and not (ours and readable == PLAIN))
        ):
            return self._unfused(query, key, value, readable, dropout_p, skip_tail)
        if sharded:
            return self.sharded(query, key, value).flatten(2)
        suits = readable == PLAIN and suits_torch(query, key, value)
        if ours and (self.is_flash or not suits):
            # late: few runs have it
            from megatron_lite.context_parallel.fused_attention import masked_attention

            return masked_attention(query, key, value, readable, scale=self.scale).flatten(2)
        # torch's own attention, which keeps its mask
        mask = None if readable == PLAIN else causal_mask(query, readable)
        query, key, value = map(heads_first, (query, key, value))
        with (
            self.rng.fork(TENSOR_PARALLEL) if dropout_p > 0.0 else nullcontext(),
            self.kernel() if mask is None else nullcontext(),
        ):
            attended = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=dropout_p,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            return heads_last(attended).flatten(2)

    def _unfused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        readable: Readable,
        dropout_p: float,
        skip_tail: bool,
    ) -> Tensor:
        s, b, heads, _ = query.shape
        mask = causal_mask(query, readable, self.cp_group)
        if mask.dim() > 2:  # [b, 1, s, s] for every head
            mask = mask.expand(-1, heads, -1, -1).flatten(0, 1)
        if self.cp_group is not None:  # one gather for both
            sizes = [key.shape[-1], value.shape[-1]]
            key, value = gather_from_sequence_parallel_region(
                torch.cat((key, value), -1), self.cp_group
            ).split(sizes, -1)
        if heads > key.shape[2]:  # the heads of a query group are neighbours
            key, value = (x.repeat_interleave(heads // x.shape[2], 2) for x in (key, value))
        # [b a/t, s, d]
        query, key, value = [x.flatten(1, 2).transpose(0, 1) for x in (query, key, value)]
        # [b a/t, s, s]. The mask is the term that baddbmm adds, so nothing keeps it for backward.
        key = key.transpose(1, 2)
        if self.cap is None:
            scores = torch.baddbmm(mask, query, key, alpha=self.scale)
        else:  # cap tanh(scores / cap) + mask
            scores = torch.baddbmm(mask, query, key, beta=0, alpha=self.scale / self.cap)
            scores = torch.add(mask, scores.tanh(), alpha=self.cap)
        dtype = scores.dtype
        if self.config.attention_softmax_in_fp32:
            dtype = at_least_float32(dtype)
        weights = F.softmax(scores, dim=-1, dtype=dtype).to(value.dtype)
        weights = dropout(weights, dropout_p, self.rng, TENSOR_PARALLEL, self.kernels)
        unread = (*weights.shape[:-1], value.shape[-1]) if skip_tail else None
        attended = applied(WEIGHTED_SUM, weights, value, unread=unread)
        return attended.transpose(0, 1).reshape(s, b, -1)


# the batched product [n, s, m] x [n, m, d] -> [n, s, d], and the gradients of both factors
WEIGHTED_SUM = Pair(
    torch.bmm, lambda grad, weights, value: (grad.bmm(value.mT), weights.mT.bmm(grad)), slice(0, 2)
)
