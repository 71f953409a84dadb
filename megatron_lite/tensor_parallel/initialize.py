"""Initial weights that depend on the seed, the parameter's name and its global shape only: the same at every TP size.

The whole tensor is cut into at most 64 blocks along its split dim, each drawn on the CPU in float32 from a generator of its
own. A rank draws only the blocks that touch its shard, so that t ranks share the work of a large model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_lite.parallel.parameter_spec import ParameterSpec, spec_of
from megatron_lite.parallel.rng import derive_seed

NUM_BLOCKS = 64


@torch.no_grad()
def initialize_parameters_(model: nn.Module, *, seed: int, tp_rank: int, tp_size: int) -> None:
    """Fills every parameter of `model` as its mark says. Draws from no stream of the run."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_values(spec_of(parameter), seed=seed, name=name, tp_rank=tp_rank, tp_size=tp_size))


def initial_values(spec: ParameterSpec, *, seed: int, name: str, tp_rank: int, tp_size: int) -> Tensor:
    """float32 CPU values of one rank's shard; vocabulary padding is zero."""
    local = torch.full(spec.local_shape(tp_size), spec.init_value, dtype=torch.float32)
    if spec.init_std is None:
        return local
    if spec.tp_dim is None:
        return _normal_rows(spec, 0, 0, spec.global_shape[0], seed=seed, name=name)
    local.zero_()
    for span in spec.spans(tp_rank, tp_size):
        rows = _normal_rows(spec, spec.tp_dim, span.global_start, span.length, seed=seed, name=name)
        local.narrow(spec.tp_dim, span.local_start, span.length).copy_(rows)
    return local


def _normal_rows(spec: ParameterSpec, dim: int, start: int, length: int, *, seed: int, name: str) -> Tensor:
    """Rows [start, start + length) along `dim` of the whole tensor's normal draw."""
    assert spec.init_std is not None
    total = spec.global_shape[dim]
    block = -(-total // NUM_BLOCKS)
    drawn = []
    for first in range(start // block * block, start + length, block):
        shape = list(spec.global_shape)
        shape[dim] = min(block, total - first)
        generator = torch.Generator().manual_seed(derive_seed("init", seed, name, first))
        drawn.append(torch.empty(shape).normal_(0.0, spec.init_std, generator=generator))
    return torch.cat(drawn, dim).narrow(dim, start % block, length)
