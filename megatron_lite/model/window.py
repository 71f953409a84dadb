"""Fused attention in which a query reads a window of keys: its own token's and those right before.

torch's kernels have no window. They take a mask of s x s elements, which autograd would keep for
backward. The same holds for the documents of --reset-attention-mask, with a mask for each sample.
The Function below builds the mask again in backward instead. A layer with a mask therefore keeps
the same tensors as a layer without one.

    device    kernel, forward and backward            the mask
    CPU       _scaled_dot_product_flash_attention     with is_causal, which skips the keys that are
              _for_cpu                                later, half of the work
    CUDA      _scaled_dot_product_efficient           alone, expanded over samples and heads
              _attention
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.context_parallel.attention_kernels import (
    Attended,
    attend,
    attend_backward,
    in_autocast_dtype,
)
from megatron_lite.context_parallel.sharded_attention import heads_first, heads_last
from megatron_lite.model.documents import document_mask


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    reach: int | None,
    scale: float,
    document_starts: Tensor | None = None,
) -> Tensor:
    """Returns attention in a window, [s, b, a/t, d].

    query: [s, b, a/t, d]. key, value: [s, b, g/t, d].
    Query i reads the keys i - reach to i, or all up to i without `reach`. With `document_starts`
    [b, s] it reads no key before the start of its document (model/documents.py), and the function
    keeps the starts too. Needs `has_kernel(query)`.
    Keeps five tensors for backward, as torch's own causal attention does:

        query, key, value   the arguments themselves; views of one storage stay views
        output              [s, b, a/t, d], which linear_proj keeps too
        log-sum-exp         of each row, [b, a/t, s] in float32 (float64 for float64)

    Forward and backward each hold a mask [s, s] in the query's dtype, and a second one while they
    build it. With documents the mask is [b, 1, s, s]. The function issues no collective and draws
    no random number.
    """
    return _WindowedAttention.apply(
        *in_autocast_dtype(query, key, value), document_starts, reach, scale
    )


def attention_mask(
    query: Tensor, reach: int | None, document_starts: Tensor | None
) -> Tensor | None:
    """Returns the mask of a window [s, s], or with documents [b, 1, s, s]; None without both."""
    if document_starts is not None:
        return document_mask(query, document_starts, reach)
    return None if reach is None else window_mask(query, reach)


def window_mask(query: Tensor, reach: int) -> Tensor:
    """Returns [s, s] in the query's dtype: 0 for the keys i - reach to i of query i, else -inf.

    The mask is added to scores. query: [s, ..].
    """
    s = query.shape[0]
    later = query.new_full((s, s), -torch.inf).triu_(1)
    earlier = query.new_full((s, s), -torch.inf).tril_(-reach - 1)
    return later.add_(earlier)


class _WindowedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        document_starts: Tensor | None,
        reach: int | None,
        scale: float,
    ) -> Tensor:
        # One call of torch's kernel: an ops(attention) policy can keep its result.
        attended = attend(
            heads_first(query),
            heads_first(key),
            heads_first(value),
            causal=True,
            scale=scale,
            mask=attention_mask(query, reach, document_starts),
        )
        ctx.reach, ctx.scale = reach, scale
        output = heads_last(attended.output)
        ctx.save_for_backward(query, key, value, output, attended.lse, document_starts)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, document_starts = ctx.saved_tensors
        grads = attend_backward(
            heads_first(grad_output.contiguous()),
            heads_first(query),
            heads_first(key),
            heads_first(value),
            Attended(heads_first(output), lse),
            causal=True,
            scale=ctx.scale,
            mask=attention_mask(query, ctx.reach, document_starts),
        )
        return *map(heads_last, grads), None, None, None
