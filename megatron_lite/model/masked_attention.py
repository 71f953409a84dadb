"""The causal mask, and fused attention that builds its mask again in backward.

torch's kernels know neither windows nor the documents of --reset-attention-mask. They take a mask
of s x s elements, or with documents one for each sample, which autograd would keep for backward.
The Function below builds the mask again instead. A layer with a mask therefore keeps the same
tensors as a layer without one.

    device    kernel, forward and backward            the mask
    CPU       _scaled_dot_product_flash_attention     with is_causal, which skips the keys that are
              _for_cpu                                later, half of the work
    CUDA      _scaled_dot_product_efficient           alone, expanded over samples and heads
              _attention
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.context_parallel.attention_kernels import (
    Attended,
    attend,
    attend_backward,
    heads_first,
    heads_last,
)
from megatron_lite.parallel.products import in_autocast_dtype
from megatron_lite.parallel.sequence_spans import ContextParallel


class Readable(NamedTuple):
    """The keys up to its own that a query may read. Without both fields it reads them all.

    reach: query i of a window reads the keys from i - reach on.
    starts: [b, s], the start of each token's document (model/documents.py). A query reads no key of
        an earlier document.
    """

    reach: int | None = None
    starts: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a query reads all keys up to its own, as torch's `is_causal` says."""
        return self.reach is None and self.starts is None


def causal_mask(query: Tensor, readable: Readable, cp: ContextParallel | None = None) -> Tensor:
    """Returns 0 for each key that a query reads, and -inf for the others, in the query's dtype.

    [s, s], or with documents [b, 1, s, s]. The mask is added to scores. query: [s, ..]. Under
    context parallelism it is [s/c, s], with the keys in the order of a gather over the ranks.
    """
    cp = cp or ContextParallel()
    positions = cp.positions_by_rank(query.shape[0], query.device)
    keys, queries = positions.flatten(), positions[cp.rank]
    hidden = keys > queries.unsqueeze(-1)
    first = None if readable.starts is None else readable.starts[:, queries]  # [b, s/c]
    if readable.reach is not None:
        nearest = queries - readable.reach
        first = nearest if first is None else first.maximum(nearest)
    if first is not None:
        hidden = hidden | (keys < first.unsqueeze(-1))
    mask = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return mask if readable.starts is None else mask.unsqueeze(1)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, readable: Readable, *, scale: float
) -> Tensor:
    """Returns attention to the readable keys, [s, b, a/t, d]. Needs `has_kernel(query)`.

    query: [s, b, a/t, d]. key, value: [s, b, g/t, d].
    Keeps five tensors for backward, as torch's own causal attention does, and the starts:

        query, key, value   the arguments themselves; views of one storage stay views
        output              [s, b, a/t, d], which linear_proj keeps too
        log-sum-exp         of each row, [b, a/t, s] in float32 (float64 for float64)

    It issues no collective and draws no random number.
    """
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = in_autocast_dtype(query, key, value)
    return _MaskedAttention.apply(query, key, value, readable.starts, readable.reach, scale)


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor | None,
        reach: int | None,
        scale: float,
    ) -> Tensor:
        # One call of torch's kernel: an ops(attention) policy can keep its result.
        first_query, first_key, first_value = map(heads_first, (query, key, value))
        mask = _mask(query, Readable(reach, starts))
        attended = attend(first_query, first_key, first_value, causal=True, scale=scale, mask=mask)
        ctx.reach, ctx.scale = reach, scale
        output = heads_last(attended.output)
        ctx.save_for_backward(query, key, value, output, attended.lse, starts)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, starts = ctx.saved_tensors
        grad, first_query, first_key, first_value = map(
            heads_first, (grad_output.contiguous(), query, key, value)
        )
        grads = attend_backward(
            grad,
            first_query,
            first_key,
            first_value,
            Attended(heads_first(output), lse),
            causal=True,
            scale=ctx.scale,
            mask=_mask(query, Readable(ctx.reach, starts)),
        )
        return *map(heads_last, grads), None, None, None


def _mask(query: Tensor, readable: Readable) -> Tensor | None:
    return None if readable.is_plain else causal_mask(query, readable)
