"""Attention itself, without its projections: the region core_attn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.checks import chosen
from megatron_lite.config.layer_pattern import reach
from megatron_lite.config.model import ModelConfig
from megatron_lite.context_parallel.attention_kernels import (
    has_kernel,
    heads_first,
    heads_last,
    takes_groups,
)
from megatron_lite.context_parallel.exchange import EXCHANGES
from megatron_lite.context_parallel.sharded_attention import context_parallel_attention
from megatron_lite.model.dropout import dropout
from megatron_lite.model.masked_attention import Readable, causal_mask, masked_attention
from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.parallel.rng import TENSOR_PARALLEL, RngStreams
from megatron_lite.parallel.sequence_spans import ContextParallel
from megatron_lite.tensor_parallel.mappings import gather_from_sequence_parallel_region


class CoreAttention(nn.Module):
    """Attention itself: query [s, b, a/t, d], key and value [s, b, g/t, d] -> [s, b, a/t * d].

    It has no parameters, and issues collectives on cp.group alone.

    "flash" is torch's scaled_dot_product_attention, with the kernel that torch picks for the
    device. Flash kernels keep their inputs, their output and one float32 per row. "auto" is flash.

    "unfused" builds a/t * s^2 * b scores. For each score it keeps the softmax in the scores' dtype.
    With dropout it also keeps the mask (1 byte) and the dropped softmax. Under
    --attention-softmax-in-fp32 it keeps the float32 softmax beside a 16-bit one. With query groups
    it keeps key and value repeated for every head.

    With dropout on a CPU both are unfused: torch has no flash kernel for that case, and would build
    the scores itself.

    Under context parallelism s stands for s/c. Flash keeps the same tensors of this rank's tokens.
    Unfused attention gathers keys and values, keeps them whole, and builds a/t * s/c * s * b
    scores. Context-parallel attention with dropout, with a window, or of shapes that no kernel
    takes is unfused on every device.

    With the starts of documents a query reads no key of an earlier document. The mask [b, 1, s, s]
    is built in forward and again in backward, like that of a window. Flash attention keeps the
    starts, which all layers share. With several samples and heads, unfused attention copies the
    mask for every head.

    layer: the layer's number in the whole model, counted from 0. It decides whether attention has a
    window. A window adds nothing to the kept bytes, with one exception. Unfused attention adds the
    mask to its scores, which keeps no mask, and flash attention builds its mask [s, s] again in
    backward (model/masked_attention.py). The exception is torch's own attention with a mask, which
    runs with dropout on CUDA and for shapes that no CUDA kernel of attention_kernels.py takes. In
    that case each layer with a window keeps a mask of its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        rng: RngStreams,
        cp: ContextParallel | None = None,
        *,
        layer: int,
        kernels: CompiledKernels | None = None,
    ) -> None:
        super().__init__()
        self.window = config.layer_window(layer)
        self.always_unfused, self.builds_scores = config.always_unfused, config.builds_scores
        self.dropout = config.attention_dropout
        self.softmax_in_fp32 = config.attention_softmax_in_fp32
        self.scale = config.head_dim**-0.5
        self.rng = rng
        self.kernels = kernels
        # the context in which torch's causal attention without dropout picks its kernel
        self.kernel: Callable[[], AbstractContextManager[object]] = nullcontext
        self.cp = cp or ContextParallel()
        if self.cp.group is not None:
            chosen("--cp-comm-type", self.cp.comm_type, EXCHANGES)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        document_starts: Tensor | None = None,
        skip_tail: bool = False,
    ) -> Tensor:
        """Runs attention.

        document_starts: [b, s] of the whole sequence (model/documents.py). A query reads no key of
            an earlier document.
        skip_tail: the output's values are never read. Unfused attention then skips its last matmul.
            Flash attention, one kernel, skips nothing.
        """
        dropout_p = self.dropout if self.training else 0.0
        readable = Readable(reach(self.window, query.shape[0] * self.cp.size), document_starts)
        sharded = self.cp.group is not None
        ours = dropout_p == 0.0 and has_kernel(query)  # our own Functions of torch's kernels
        if (
            self.always_unfused
            or (dropout_p > 0.0 and self.builds_scores(query.device.type))
            or (sharded and not (ours and readable.is_plain))
        ):
            return self._unfused(query, key, value, readable, dropout_p, skip_tail)
        if sharded:
            attended = context_parallel_attention(query, key, value, cp=self.cp, scale=self.scale)
        elif ours and not (readable.is_plain and takes_groups(query, key)):
            attended = masked_attention(query, key, value, readable, scale=self.scale)
        else:
            attended = self._torchs(query, key, value, readable, dropout_p)
        return attended.flatten(2)

    def _torchs(
        self, query: Tensor, key: Tensor, value: Tensor, readable: Readable, dropout_p: float
    ) -> Tensor:
        """Returns torch's own attention, [s, b, a/t, d], which keeps its mask."""
        mask = None if readable.is_plain else causal_mask(query, readable)
        kernel = self.kernel if mask is None and dropout_p == 0.0 else nullcontext
        query, key, value = map(heads_first, (query, key, value))
        with self.rng.fork(TENSOR_PARALLEL) if dropout_p > 0.0 else kernel():
            return heads_last(
                F.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    attn_mask=mask,
                    dropout_p=dropout_p,
                    is_causal=mask is None,
                    scale=self.scale,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
            )

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
        mask = causal_mask(query, readable, self.cp)
        if mask.dim() > 2:  # [b, 1, s, s] for every head
            mask = mask.expand(-1, heads, -1, -1).flatten(0, 1)
        if self.cp.group is not None:  # one gather for both: [s, 2, b, g/t, d]
            key, value = gather_from_sequence_parallel_region(
                torch.stack((key, value), 1), self.cp.group
            ).unbind(1)
        if heads > key.shape[2]:  # the heads of a query group are neighbours
            key, value = (x.repeat_interleave(heads // x.shape[2], 2) for x in (key, value))
        # [b a/t, s, d]
        query, key, value = (x.flatten(1, 2).transpose(0, 1) for x in (query, key, value))
        # [b a/t, s, s]. The mask is the term that baddbmm adds, so nothing keeps it for backward.
        scores = torch.baddbmm(mask, query, key.transpose(1, 2), alpha=self.scale)
        dtype = scores.dtype
        if self.softmax_in_fp32:
            dtype = torch.promote_types(dtype, torch.float32)
        weights = F.softmax(scores, dim=-1, dtype=dtype).to(value.dtype)
        weights = dropout(weights, dropout_p, self.rng, TENSOR_PARALLEL, self.kernels)
        attended: Tensor = _WeightedSum.apply(weights, value, skip_tail)
        return attended.transpose(0, 1).reshape(s, b, -1)


class _WeightedSum(torch.autograd.Function):
    """The batched product [n, s, m] x [n, m, d] -> [n, s, d]. Keeps both factors.

    skip_tail: leaves out the matmul. The result has the right shape and arbitrary values.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, skip_tail: bool) -> Tensor:
        ctx.save_for_backward(weights, value)
        if skip_tail:
            return value.new_empty(()).expand(*weights.shape[:-1], value.shape[-1])
        return torch.bmm(weights, value)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, value = ctx.saved_tensors
        return (
            torch.bmm(grad_output, value.transpose(1, 2)),
            torch.bmm(weights.transpose(1, 2), grad_output),
            None,
        )
