"""Dropout on a named RNG stream, with a mask of one byte per element on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.parallel.rng import RngStreams


def dropout(tensor: Tensor, probability: float, rng: RngStreams, stream: str) -> Tensor:
    """`tensor` with elements zeroed and the rest scaled by 1/(1-p); the tensor itself at p = 0. Keeps a bool mask.

    torch's own F.dropout keeps a mask in the tensor's dtype on the CPU, 2 or 4 times as large.
    """
    if probability == 0.0:
        return tensor
    with rng.fork(stream):
        return torch.native_dropout(tensor, probability, True)[0]
