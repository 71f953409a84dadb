"""Figures of the whole model's gradients or weights, over tensor-parallel ranks. None of them waits for the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.parameter_spec import spec_of
from megatron_lite.parallel.state import ParallelState


def global_norm(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor], parallel: ParallelState) -> Tensor:
    """The true 2-norm of `values` (gradients, or the parameters themselves): 0-d float32, the same on every rank.

    One all-reduce of one number over the TP group.
    """
    counted = _counted_here(parameters, values, parallel)
    norms = torch.stack(torch._foreach_norm(counted)) if counted else torch.zeros(1, device=parallel.device)
    return all_reduce_(norms.float().square().sum(), parallel.tp_group).sqrt()


def count_zeros(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor], parallel: ParallelState) -> Tensor:
    """How many elements of `values` are exactly 0, over all TP ranks: 0-d int64. One all-reduce of one number."""
    zeros = torch.zeros((), dtype=torch.int64, device=parallel.device)
    for value in _counted_here(parameters, values, parallel):
        zeros += value.numel() - value.count_nonzero()
    return all_reduce_(zeros, parallel.tp_group)


def _counted_here(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor], parallel: ParallelState) -> list[Tensor]:
    """Sharded parameters count on every TP rank; those that all ranks hold alike count once, on rank 0."""
    return [values[name] for name, parameter in parameters.items()
            if parallel.tp_rank == 0 or spec_of(parameter).tp_dim is not None]
