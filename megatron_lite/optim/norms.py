"""Figures of the whole model's gradients or weights, over the ranks of one model. None of them waits for the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.parameter_spec import spec_of
from megatron_lite.parallel.state import ParallelState


def global_norm(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor], parallel: ParallelState) -> Tensor:
    """The true 2-norm of `values` (gradients, or the parameters themselves): 0-d, the same on every rank.

    One all-reduce of one number over the TP group, one over the pipeline.
    """
    counted = [values[name] for name, parameter in parameters.items() if _counts_here(parameter, parallel)]
    norms = torch.stack(torch._foreach_norm(counted)) if counted else torch.zeros(1, device=parallel.device)
    return _sum_over_model(norms.square().sum(), parallel).sqrt()


def count_zeros(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor], parallel: ParallelState) -> Tensor:
    """How many elements of `values` are 0, over the whole model, without padding: 0-d int64. Two all-reduces as above."""
    zeros = torch.zeros((), dtype=torch.int64, device=parallel.device)
    for name, parameter in parameters.items():
        if _counts_here(parameter, parallel):
            for rows in _true_rows(values[name], parameter, parallel):
                zeros += rows.numel() - rows.count_nonzero()
    return _sum_over_model(zeros, parallel)


def _sum_over_model(value: Tensor, parallel: ParallelState) -> Tensor:
    return all_reduce_(all_reduce_(value, parallel.tp_group), parallel.pp_group)


def _true_rows(value: Tensor, parameter: nn.Parameter, parallel: ParallelState) -> list[Tensor]:
    """The parts of this rank's shard without vocabulary padding, whose gradient is always 0."""
    spec = spec_of(parameter)
    if spec.tp_dim is None:
        return [value]
    return [value.narrow(spec.tp_dim, span.local_start, span.length) for span in spec.spans(parallel.tp_rank, parallel.tp_size)]


def _counts_here(parameter: nn.Parameter, parallel: ParallelState) -> bool:
    """Sharded parameters count on every TP rank; those that all ranks hold alike count once, on rank 0, and copies never."""
    spec = spec_of(parameter)
    return not spec.is_copy and (parallel.tp_rank == 0 or spec.tp_dim is not None)
