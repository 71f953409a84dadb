"""What those who read weights must know of data-parallel ranks that share them out, or are gathering them: these functions.

A layout leaves what it needs done on modules and parameters, under the names below.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

READER = "weight_reader"  # () -> the module's weight, ready to compute with
STAND_INS = "weight_stand_ins"  # () -> the tensors that stand for parameters while the module computes
GATHERED_DTYPE = "gathered_dtype"  # of a sharded parameter: what its gathered whole is rounded to


def weight_of(module: nn.Module) -> Tensor:
    """`module.weight`, for those who compute with it and do not call the module."""
    reader = module.__dict__.get(READER)
    return module.weight if reader is None else reader()  # type: ignore[return-value]


def gathered_dtype(parameter: Tensor) -> torch.dtype:
    """What the model computes with in place of a parameter: its own dtype, unless it is sharded and gathered in another."""
    return getattr(parameter, GATHERED_DTYPE, parameter.dtype)


def weights_in_use(module: nn.Module) -> Iterator[Tensor]:
    """The parameters of a module, and whatever stands for them while it computes: the same storages in every step.

    The first call may gather weights, so every rank must make it.
    """
    yield from module.parameters()
    for part in module.modules():
        stand_ins = part.__dict__.get(STAND_INS)
        if stand_ins is not None:
            yield from stand_ins()
