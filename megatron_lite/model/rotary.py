"""Rotary position embedding (arXiv 2104.09864) in the half-split layout of Megatron and Llama."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.config.model import (
    FAST_TURNS,
    NO_SCALING,
    ORIGINAL_LENGTH,
    SLOW_TURNS,
    RotaryScaling,
)


class RotaryTables(NamedTuple):
    """Cosines and sines of every position, each [s, 1, 1, rotary_dim]."""

    cos: Tensor
    sin: Tensor


def rotary_tables(
    seq_length: int,
    rotary_dim: int,
    base: float,
    *,
    device: torch.device,
    dtype: torch.dtype,
    scaling: RotaryScaling = NO_SCALING,
) -> RotaryTables:
    """Returns the tables of positions 0 .. s-1: angle = position / base^(2i/rotary_dim).

    The angles are computed in float32. scaling: changes the frequencies and the positions.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    positions = torch.arange(seq_length, dtype=torch.float32, device=device)
    frequencies = 1.0 / base**exponents
    if scaling.frequency_factor is not None:
        frequencies = _scaled(frequencies, scaling.frequency_factor)
    if scaling.position_factor is not None:
        positions *= 1 / scaling.position_factor
    angles = torch.outer(positions, frequencies)
    # Channels i and i + rotary_dim/2 form a pair (half-split layout), so they share an angle.
    angles = torch.cat((angles, angles), dim=-1)[:, None, None, :]
    return RotaryTables(angles.cos().to(dtype), angles.sin().to(dtype))


def _scaled(frequencies: Tensor, factor: float) -> Tensor:
    """Returns the frequencies by Llama 3.1's rule.

    A frequency that makes `turns` turns within the original length is divided by the factor if
    turns < SLOW_TURNS, and stays if turns > FAST_TURNS. Between the two, the share of the unchanged
    frequency grows linearly with the turns.
    """
    turns = ORIGINAL_LENGTH / (2 * math.pi / frequencies)
    unchanged = ((turns - SLOW_TURNS) / (FAST_TURNS - SLOW_TURNS)).clamp(0.0, 1.0)
    return (1 - unchanged) * frequencies / factor + unchanged * frequencies


def apply_rotary(heads: Tensor, tables: RotaryTables) -> Tensor:
    """Rotates the first rotary_dim channels of each head by its position, and leaves the others.

    heads: [s, b, a/t or g/t, d].
    """
    rotary_dim = tables.cos.shape[-1]
    rotated, passed = heads[..., :rotary_dim], heads[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * tables.cos + torch.cat((-second, first), dim=-1) * tables.sin
    return rotated if passed.shape[-1] == 0 else torch.cat((rotated, passed), dim=-1)
