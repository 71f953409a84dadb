"""Fused attention of some queries to some keys, with the log-sum-exp of each row, forward and backward: torch's own kernels.

The backward of a kernel rebuilds softmax as exp(q k - lse) and needs of all other keys only that `lse` and rowsum(dy * y). Given
both of all keys it returns the gradients of its own keys: so the gradients of parts add up (2205.14135, 2310.01889).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

LARGEST_FLASH_HEAD = 256
aten = torch.ops.aten


class Attended(NamedTuple):
    """output: [b, a, n, d] in any memory layout. lse: [b, a, n], at least float32: log of the sum of exponentials of each row."""

    output: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """Like query, key and value."""

    query: Tensor
    key: Tensor
    value: Tensor


def has_kernel(query: Tensor) -> bool:
    """Whether there is one for such tensors: dtype, device, channels of a head in the last dim."""
    channels = query.shape[-1]
    if query.device.type == "cpu":
        return True
    if query.dtype == torch.float32:
        return channels % 4 == 0
    return query.dtype in (torch.bfloat16, torch.float16) and channels % 8 == 0 and channels <= LARGEST_FLASH_HEAD


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> Attended:
    """softmax(scale q k^T) v. query: [b, a, n, d], key and value: [b, g, m, d]. causal: row i reads columns 0 to i; n = m."""
    if query.device.type == "cpu":
        return Attended(*aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale))
    if query.dtype == torch.float32:
        key, value = _for_each_head(query, key, value)
        output, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, causal, scale=scale)
        return Attended(output, lse[..., : query.shape[2]])  # its rows are padded
    output, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    return Attended(output, lse)


def attend_backward(grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, *, causal: bool,
                    scale: float) -> Gradients:
    """What these keys and values contribute. attended: of these queries to all of their keys. Shapes as of `attend`."""
    if query.device.type == "cpu":
        return Gradients(*aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_output, query, key, value, *attended, 0.0, causal, scale=scale))
    if query.dtype == torch.float32:
        return _efficient_backward(grad_output, query, key, value, attended, causal=causal, scale=scale)
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of the dropout that there is not
    lengths: list[Any] = [None, None, query.shape[2], key.shape[2]]
    return Gradients(*aten._scaled_dot_product_flash_attention_backward(
        grad_output, query, key, value, attended.output, attended.lse.contiguous(), *lengths, 0.0, causal, seed,
        torch.empty_like(seed[0]), scale=scale))


def _efficient_backward(grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, *, causal: bool,
                        scale: float) -> Gradients:
    b, groups, m, d = key.shape
    rows = attended.lse.shape[-1]
    lse = torch.nn.functional.pad(attended.lse, (0, -rows % 32), value=torch.inf)
    seed = torch.empty((), dtype=torch.int64, device=query.device)  # of the dropout that there is not
    grad_query, grad_key, grad_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_output, query, *_for_each_head(query, key, value), None, attended.output, lse, seed, seed, 0.0,
        [True, True, True, False], causal, scale=scale)
    return Gradients(grad_query, *(grad.reshape(b, groups, -1, m, d).sum(2) for grad in (grad_key, grad_value)))


def _for_each_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value repeated for every head: this kernel knows no query groups."""
    repeats = query.shape[1] // key.shape[1]
    return (key, value) if repeats == 1 else (key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))
