"""Rotary position embedding (arXiv 2104.09864) in the half-split layout of Megatron and Llama."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RotaryTables(NamedTuple):
    """Cosines and sines of every position, each [s, 1, 1, rotary_dim]."""

    cos: Tensor
    sin: Tensor


def rotary_tables(
    seq_length: int, rotary_dim: int, base: float, *, device: torch.device, dtype: torch.dtype
) -> RotaryTables:
    """Returns the tables of positions 0 .. s-1: angle = position / base^(2i/rotary_dim).

    The angles are computed in float32.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    positions = torch.arange(seq_length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, 1.0 / base**exponents)
    angles = torch.cat((angles, angles), dim=-1)[:, None, None, :]
    return RotaryTables(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rotary(heads: Tensor, tables: RotaryTables) -> Tensor:
    """Rotates the first rotary_dim channels of each head by its position, and leaves the others.

    heads: [s, b, a/t or g/t, d].
    """
    rotary_dim = tables.cos.shape[-1]
    rotated, passed = heads[..., :rotary_dim], heads[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * tables.cos + torch.cat((-second, first), dim=-1) * tables.sin
    return rotated if passed.shape[-1] == 0 else torch.cat((rotated, passed), dim=-1)
