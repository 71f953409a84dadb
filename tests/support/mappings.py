"""The operator f of 1909.08053, for references that enter a tensor-parallel region.

The product has it as a part of tensor_parallel/layers.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import all_reduce


def copy_to_tensor_parallel_region(hidden_states: Tensor, tp_group: ProcessGroup | None) -> Tensor:
    """Returns the tensor, which is equal on every TP rank.

    Its gradient is the sum of the ranks' gradients, by one all-reduce in backward.
    """
    return hidden_states if tp_group is None else _Copy.apply(hidden_states, tp_group)


class _Copy(torch.autograd.Function):
    """The identity in forward, an all-reduce over tp_group in backward. It keeps nothing."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, tp_group: ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        # out of place: autograd may share grad_output
        return all_reduce(grad_output, ctx.tp_group), None
