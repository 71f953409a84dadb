"""The two sides of each candidate of benchmarks/candidates.py: the code without and with it.

Each function returns (without, with) on tensors of the shape "medium" in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.engines import PRESETS, Shape
from megatron_lite.model.attention import _SplitHeads
from megatron_lite.model.causal_attention import BY_PRODUCTS, causal_attention
from megatron_lite.parallel.products import (
    add_rounded_,
    add_rows_,
    add_weight_product_,
    input_gradient,
    linear,
)
from megatron_lite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

SHAPE = PRESETS["medium"]
H, A, S, B, V = (
    SHAPE.hidden_size,
    SHAPE.num_attention_heads,
    SHAPE.seq_length,
    SHAPE.batch_size,
    SHAPE.vocab_size,
)
D, TOKENS = H // A, S * B
CHUNK = 512
Sides = tuple[Callable[[], Any], Callable[[], Any]]
aten = torch.ops.aten


def weight_gradients() -> Sides:
    """The weight gradient of linear_fc1."""
    x, grad, total = torch.randn(TOKENS, H), torch.randn(TOKENS, 4 * H), torch.zeros(4 * H, H)

    def apart() -> None:
        total.copy_(grad.t().matmul(x))

    return apart, lambda: torch.addmm(total, grad.t(), x, beta=0, out=total)


def products_by_onednn() -> Sides:
    """The three products of linear_fc1."""
    x, weight, bias = torch.randn(TOKENS, H), torch.randn(4 * H, H), torch.randn(4 * H)
    grad, total = torch.randn(TOKENS, 4 * H), torch.zeros(4 * H, H)

    def products(onednn: bool) -> None:
        with torch.no_grad():
            linear(x, weight, bias, onednn=onednn)
            input_gradient(grad, weight, onednn=onednn)
            add_weight_product_(total, x, grad, first=True, onednn=onednn)

    return lambda: products(False), lambda: products(True)


def residual_and_norm() -> Sides:
    """Residual sum, dropout and LayerNorm: for all tokens, and for 64 tokens at a time."""
    x, residual, weight, bias = (
        torch.randn(TOKENS, H),
        torch.randn(TOKENS, H),
        torch.ones(H),
        torch.zeros(H),
    )
    mask = torch.rand(TOKENS, H) > 0.1
    summed, normed = torch.empty_like(x), torch.empty_like(x)
    rows = 64

    def at_once() -> None:
        torch.addcmul(residual, x, mask, value=1 / 0.9, out=summed)
        normed.copy_(F.layer_norm(summed, (H,), weight, bias))

    def in_parts() -> None:
        for start in range(0, TOKENS, rows):
            part = slice(start, start + rows)
            torch.addcmul(residual[part], x[part], mask[part], value=1 / 0.9, out=summed[part])
            normed[part].copy_(F.layer_norm(summed[part], (H,), weight, bias))

    return at_once, in_parts


def split_heads() -> Sides:
    """The backward of the split of linear_qkv's output, for gradients in the layout of SDPA's."""
    qkv = torch.randn(S, B, 3 * H, requires_grad=True)
    grads = [torch.randn(B, S, A, D).transpose(0, 1) for _ in range(3)]
    heads = qkv.view(S, B, A, 3, D)
    views = [heads[..., part, :] for part in range(3)]
    split = _SplitHeads.apply(qkv, 1, D)
    return (
        lambda: torch.autograd.grad(views, qkv, grads, retain_graph=True),
        lambda: torch.autograd.grad(split, qkv, grads, retain_graph=True),
    )


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = (one.permute(1, 2, 0, 3) for one in (query, key, value))
    attended = F.scaled_dot_product_attention(*heads, is_causal=True, scale=D**-0.5)
    return attended.permute(2, 0, 1, 3)


def attention_in_blocks(length: int, samples: int) -> Sides:
    """Forward and backward of causal attention, on views of linear_qkv's output.

    The second side runs in blocks at any length.
    """
    heads = torch.randn(length, samples, A, 3, D)
    leaves = [heads[..., part, :].requires_grad_() for part in range(3)]
    grad = torch.randn(length, samples, A, D)

    def in_blocks() -> None:
        with patch("megatron_lite.description.sizes.LONGEST_IN_BLOCKS", length):
            torch.autograd.grad(causal_attention(*leaves, scale=D**-0.5), leaves, grad)

    return lambda: torch.autograd.grad(_sdpa(*leaves), leaves, grad), in_blocks


def bf16_attention(length: int, samples: int) -> Sides:
    """Forward and backward of causal bf16 attention: torch's kernel, and products."""
    heads = torch.randn(length, samples, A, 3, D, dtype=torch.bfloat16)
    leaves = [heads[..., part, :].requires_grad_() for part in range(3)]
    grad = torch.randn(length, samples, A, D, dtype=torch.bfloat16)
    return (
        lambda: torch.autograd.grad(_sdpa(*leaves), leaves, grad),
        lambda: torch.autograd.grad(
            causal_attention(*leaves, scale=D**-0.5, way=BY_PRODUCTS), leaves, grad
        ),
    )


def contiguous_heads() -> Sides:
    """Forward and backward of torch's kernel on strided heads, and on contiguous copies."""
    heads = torch.randn(S, B, A, 3, D)
    strided = [heads[..., part, :].permute(1, 2, 0, 3) for part in range(3)]
    grad = torch.randn(S, B, A, D).permute(1, 2, 0, 3)

    def run(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> None:
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
        aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, lse, 0.0, True
        )

    return (
        lambda: run(*strided, grad),
        lambda: run(*(one.contiguous() for one in (*strided, grad))),
    )


def gelu_backward() -> Sides:
    """The backward of tanh's gelu: y' = p (1 + x z' (1 - p)) for y = x p, p = sigmoid(z)."""
    x, grad = torch.randn(TOKENS * 4 * H), torch.randn(TOKENS * 4 * H)
    slope, cubic, block = (8.0 / math.pi) ** 0.5, 0.044715, 2**16

    def by_sigmoid() -> Tensor:
        result, inner, share = torch.empty_like(x), torch.empty(block), torch.empty(block)
        parts = zip(x.split(block), grad.split(block), result.split(block), strict=True)
        for part, grads, into in parts:
            torch.mul(part, part, out=inner)
            torch.mul(inner, cubic * slope, out=share).add_(slope).mul_(part).sigmoid_()
            inner.mul_(3 * cubic * slope).add_(slope).mul_(part)
            inner.addcmul_(inner, share, value=-1).add_(1).mul_(share)
            torch.mul(inner, grads, out=into)
        return result

    return lambda: aten.gelu_backward(grad, x, approximate="tanh"), by_sigmoid


def bias_gradients() -> Sides:
    """The bias gradients of the four linear layers of a layer."""
    grads, ones = [torch.randn(TOKENS, width * H) for width in (3, 1, 4, 1)], torch.ones(1, TOKENS)
    return (lambda: [grad.sum(0) for grad in grads], lambda: [ones.mm(grad) for grad in grads])


def embedding_gradient(shape: Shape = SHAPE, dtype: torch.dtype = torch.float32) -> Sides:
    """The lookup's gradient of a tied weight, added to the gradient of the head."""
    tokens, rows = shape.batch_size * shape.seq_length, shape.vocab_size
    ids, grad = torch.randint(0, rows, (tokens,)), torch.randn(tokens, shape.hidden_size).to(dtype)
    total = torch.zeros(rows, shape.hidden_size)

    def dense() -> None:
        table = aten.embedding_dense_backward(grad, ids, rows, -1, False)
        if dtype == torch.float32:
            total.add_(table)
        else:
            add_rounded_(total, table, first=False)

    return dense, lambda: add_rows_(total, ids, grad, first=False)


def gradient_in_parts(shape: Shape) -> Sides:
    """The bf16 gradient of the output projection, added to the float32 sum."""
    tokens, rows = shape.batch_size * shape.seq_length, shape.vocab_size
    x, grad = (torch.randn(tokens, size).bfloat16() for size in (shape.hidden_size, rows))
    total = torch.zeros(rows, shape.hidden_size)

    def whole() -> None:
        add_rounded_(total, grad.t() @ x, first=False)

    return whole, lambda: add_weight_product_(total, x, grad, first=False, onednn=False)


def clipping_in_update(shape: Shape) -> Sides:
    """Clipping and AdamW over the layers' and the embedding's weights, in two passes or in one."""
    hidden = shape.hidden_size
    sizes = [(12 * hidden, hidden)] * shape.num_layers + [(shape.vocab_size, hidden)]
    masters, grads, means, squares = ([torch.rand(one) for one in sizes] for _ in range(4))
    steps = [torch.zeros(()) for _ in sizes]
    factor = torch.tensor(0.999)

    def update(grad_scale: Tensor | None) -> None:
        torch._fused_adamw_(
            masters,
            grads,
            means,
            squares,
            [],
            steps,
            lr=1e-4,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
        )

    def apart() -> None:
        torch._foreach_mul_(grads, factor)
        update(None)

    return apart, lambda: update(1.0 / factor)


def loss_in_one_pass() -> Sides:
    """Projection, loss and both gradients: with all logits, and in chunks during the forward.

    The second form knows each token's incoming gradient before the loss. Its logits exist for one
    chunk at a time, and it needs no fourth matmul.
    """
    x, weight = torch.randn(TOKENS, H), torch.randn(V, H) * 0.02
    labels = torch.randint(0, V, (TOKENS,))
    total, buffer, incoming = torch.zeros(V, H), torch.empty(CHUNK, V), 1.0 / TOKENS

    def with_logits() -> None:
        logits = F.linear(x, weight).view(TOKENS, 1, V).requires_grad_()
        losses = vocab_parallel_cross_entropy(
            logits,
            labels.view(TOKENS, 1),
            tp_group=None,
            first_id=0,
            num_ids=V,
            overwrite_logits=True,
        )
        (grad,) = torch.autograd.grad(losses.mean(), logits)
        rows = grad.detach().view(TOKENS, V)  # written over the logits, so it is their leaf
        rows.mm(weight)
        torch.addmm(total, rows.t(), x, beta=0, out=total)

    def in_one_pass() -> None:
        grad_input, losses = torch.empty_like(x), torch.empty(TOKENS)
        for start in range(0, TOKENS, CHUNK):
            rows = slice(start, start + CHUNK)
            logits = torch.mm(x[rows], weight.t(), out=buffer)
            for few in range(0, CHUNK, 32):
                part, own = logits[few : few + 32], labels[start + few : start + few + 32, None]
                shifted = part - part.amax(-1, keepdim=True)
                at_label = shifted.gather(-1, own)
                softmax = torch.softmax(shifted, -1)
                losses[start + few : start + few + 32] = -(
                    at_label + softmax.amax(-1, keepdim=True).log()
                ).squeeze(-1)
                softmax.scatter_add_(-1, own, torch.full_like(at_label, -1.0))
                torch.mul(softmax, incoming, out=part)
            torch.mm(logits, weight, out=grad_input[rows])
            torch.addmm(total, logits.t(), x[rows], beta=0 if start == 0 else 1, out=total)

    return with_logits, in_one_pass
