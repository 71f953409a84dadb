"""States of the optimizer in less than float32 or in host memory, read and written part by part.

    fp32    as it is
    bf16    rounded once, when an update writes it
    fp16    stored x scale, with a scale for each part that brings its largest value below 2^15

Every update computes in float32. A scale is a power of two, so what is stored is exact in the
float32 of a checkpoint, and reading it back gives the same values. The states of a parameter are
cut into parts of at most PART elements, so that no float32 copy of a large one exists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.config import optimizer_settings

SCALES = "scales_of_parts"
HEADROOM = 15  # 2^15 is below float16's largest number
LEAST_EXPONENT = -100  # so that the scale is no subnormal number


def parts_of(state: Tensor) -> list[slice]:
    """Returns the places of the parts in a flattened state."""
    size = optimizer_settings.PART
    return [slice(start, start + size) for start in range(0, state.numel(), size)]


def new_state(like: Tensor, kind: str, device: torch.device) -> Tensor:
    """Returns zeros in the shape of a weight. kind: "fp32" (float64 for such a weight), "bf16" or
    "fp16"."""
    wide = torch.promote_types(like.dtype, torch.float32)
    dtype = {"fp32": wide, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    state = torch.zeros(like.shape, dtype=dtype, device=device)
    if kind == "fp16":
        setattr(state, SCALES, torch.ones(len(parts_of(state)), device=device))
    return state


def read(state: Tensor, part: slice) -> Tensor:
    """Returns a part as float32 (float64): the state's own memory, if it has that format."""
    own = state.detach().view(-1)[part]
    if own.dtype.itemsize > 2:
        return own
    scales = getattr(state, SCALES, None)
    values = own.float()
    return values if scales is None else values.mul_(scales[part.start // optimizer_settings.PART])


def write_(state: Tensor, part: slice, values: Tensor) -> None:
    """Overwrites a part, rounding once. values: float32 (float64)."""
    own, scales = state.detach().view(-1)[part], getattr(state, SCALES, None)
    if scales is not None:
        scale = scales[part.start // optimizer_settings.PART]
        values = values.float()
        mantissa, exponent = torch.frexp(values.abs().max())
        # A largest value that float16 rounds up to a power of two has the next exponent when read.
        exponent = (exponent + (mantissa >= 1.0 - 2.0**-12)).clamp(min=LEAST_EXPONENT)
        scale.copy_(torch.ldexp(torch.ones_like(scale), exponent - HEADROOM))
        values = values / scale
    own.copy_(values)


def write_whole_(state: Tensor, values: Tensor) -> None:
    """Overwrites a state with values of any format, rounding once."""
    flat = values.detach().reshape(-1)
    for part in parts_of(state):
        write_(state, part, flat[part])


def whole(state: Tensor) -> Tensor:
    """Returns a state as float32 (float64), in its shape."""
    if state.dtype.itemsize > 2:
        return state
    return torch.cat([read(state, part) for part in parts_of(state)]).view(state.shape)
