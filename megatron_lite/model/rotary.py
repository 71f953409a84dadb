"""Rotary position embedding (arXiv 2104.09864) in the half-split layout of Megatron and Llama, or
with pairs of neighbours (--rotary-interleaved). A model without it does not load this file."""

import math
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.model import NORM_VECTORS, ModelConfig
from megatron_lite.config.variants import FAST_TURNS, ORIGINAL_LENGTH, SLOW_TURNS
from megatron_lite.parallel.compiled import Function, Pair, Tensors

from .attention import join_heads, split_heads
from .norm import NORMS


def rotary_tables(
    config: ModelConfig,
    seq_length: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    local_base: int | None = None,
) -> Tensors:
    """Returns the tables of positions 0 .. s-1: angle = position / base^(2i/rotary_dim).

    They are cosines and sines, each [s, 1, 1, rotary_dim], or [s, 1, 1, rotary_dim / 2, 2] where
    neighbouring channels form a pair: the shape tells `rotate` which channels do.

    The angles are computed in float32. Settings change frequencies, positions and the magnitude,
    but not in layers with a window and a base of their own, which is `local_base`.
    """
    positions = torch.arange(seq_length, dtype=torch.float32, device=device)
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=device)
    waves = (local_base or config.rotary_base) ** (exponents / config.rotary_dim)
    frequencies, magnitude, interleaved = 1.0 / waves, 1.0, config.rotary_interleaved
    if local_base is None:
        frequencies, magnitude = _frequencies(waves, seq_length, config), config.rotary_magnitude
        if config.rotary_seq_len_interpolation_factor is not None:
            positions *= 1 / config.rotary_seq_len_interpolation_factor
    angles = torch.outer(positions, frequencies)
    # Channels i and i + rotary_dim/2 form a pair (half-split layout), so they share an angle.
    pairs = torch.stack((angles, angles), dim=-1 if interleaved else 1)[:, None, None]
    angles = pairs if interleaved else pairs.flatten(3)
    return tuple((table * magnitude).to(dtype) for table in (angles.cos(), angles.sin()))


def _frequencies(waves: Tensor, seq_length: int, config: ModelConfig) -> Tensor:
    """Returns the frequency of each pair of channels. waves: 1 / frequency without a scaling."""
    length, dim = config.original_max_position_embeddings, config.rotary_dim
    if config.rope_type == "longrope":
        divisors = config.long_factor if seq_length > length else config.short_factor
        return 1.0 / (waves.new_tensor(divisors) * waves)
    if config.rope_type == "yarn":
        # the channels that make these turns within the original length
        first, last = (
            dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))
            for turns in (config.beta_fast, config.beta_slow)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
        channels = torch.arange(len(waves), dtype=waves.dtype, device=waves.device)
        stays = 1 - ((channels - first) / (last - first or 0.001)).clamp(0.0, 1.0)
        return 1.0 / (config.rotary_scaling_factor * waves) * (1 - stays) + 1.0 / waves * stays
    frequencies = 1.0 / waves
    if not config.use_rope_scaling:
        return frequencies
    # Llama 3.1's rule. A frequency that makes `turns` turns within the original length is divided
    # by the factor if turns < SLOW_TURNS, and stays if turns > FAST_TURNS. Between the two, the
    # share of the unchanged frequency grows linearly with the turns.
    turns = ORIGINAL_LENGTH / (2 * math.pi / frequencies)
    unchanged = ((turns - SLOW_TURNS) / (FAST_TURNS - SLOW_TURNS)).clamp(0.0, 1.0)
    return (1 - unchanged) * frequencies / config.rope_scaling_factor + unchanged * frequencies


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x cos + (-x2, x1) sin over the first channels of each head: [s, b, .., d].

    The other channels stay. The pair with `rotate_back` keeps the two tables.
    """
    width = cos[0].numel()
    turned, passed = heads[..., :width], heads[..., width:]
    if cos.dim() == 5:  # neighbours form pairs
        first, second = turned.unflatten(-1, (-1, 2)).unbind(-1)
        across = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        across = torch.cat((-second, first), dim=-1)
    cos, sin = (one.reshape(-1, *[1] * (heads.dim() - 2), width) for one in (cos, sin))
    turned = turned * cos + across * sin
    return torch.cat((turned, passed), dim=-1) if passed.shape[-1] else turned


def rotate_back(grad_output: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the gradient of `rotate` with respect to the heads: it is turned the other way."""
    return rotate(grad_output, cos, -sin)


ROTATION = Pair(rotate, rotate_back, slice(1, 3))


def split_rotated(qkv: Tensor, cos: Tensor, sin: Tensor, *, queries: int, d: int) -> Tensors:
    """Returns query and key, rotated, and value of qkv [s, b, g/t (q + 2) d]."""
    query, key, value = split_heads(qkv, queries=queries, d=d, is_view=True)
    return rotate(query, cos, sin).flatten(2, 3), rotate(key, cos, sin), value


def joined_back(
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Returns the gradient of `split_rotated` with respect to qkv."""
    grad_query, grad_key = (rotate_back(one, cos, sin) for one in (grad_query, grad_key))
    return join_heads(grad_query, grad_key, grad_value)


def turning(forward: Function, backward: Function) -> Pair:
    """Returns a pair of query, key and value whose last two inputs are the tables of a rotation.

    They alone are kept. With compiled kernels all results are contiguous.
    """
    return Pair(forward, backward, slice(-2, None), outputs=3)


@cache  # the functions are a part of the key of a compiled graph
def rotated_heads(queries: int, d: int) -> Pair:
    """Returns the pair [s, b, g/t (q + 2) d] -> the rotated query [s, b, a/t, d] and key
    [s, b, g/t, d], and the value."""
    return turning(partial(split_rotated, queries=queries, d=d), joined_back)


@cache
def rotating(normalization: str) -> Pair:
    """Returns the pair of a norm and a rotation after it, as compiled kernels compute it."""
    pair, num_vectors = NORMS[normalization], NORM_VECTORS[normalization]
    of_pair = pair.fused or pair.backward

    def forward(heads: Tensor, *others: Tensor, epsilon: float) -> Tensors:
        results = pair.forward(heads, *others[:-2], epsilon=epsilon)
        normed, *statistics = (results,) if isinstance(results, Tensor) else results
        return rotate(normed, *others[-2:]), *statistics

    def backward(grad_output: Tensor, heads: Tensor, weight: Tensor, *others: Tensor) -> Any:
        tables, statistics = others[num_vectors - 1 :][:2], others[num_vectors + 1 :]
        return of_pair(rotate_back(grad_output, *tables), heads, weight, *statistics)

    return Pair(forward, backward, slice(0, 3 + num_vectors))
