"""Initial weights that are the same at every TP size.

They depend only on the seed, the parameter's name and its global shape. The whole tensor is cut
into at most 64 blocks along its split dim. Each block is drawn on the CPU in float32, from its own
generator. A rank draws only the blocks that overlap its shard, so t ranks split the work of a large
model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_lite.parallel.parameter_spec import ParameterSpec, spec_of
from megatron_lite.parallel.rng import derive_seed
from megatron_lite.parallel.torch_internals import is_fake

NUM_BLOCKS = 64


@torch.no_grad()
def initialize_parameters_(model: nn.Module, *, seed: int, tp_rank: int, tp_size: int) -> None:
    """Fills every parameter of `model` as its ParameterSpec describes.

    Draws from none of the run's random-number streams. Fake parameters, which have no values, are
    left as they are.
    """
    for name, parameter in model.named_parameters():
        if is_fake(parameter):
            continue
        parameter.copy_(
            initial_values(
                spec_of(parameter), seed=seed, name=name, tp_rank=tp_rank, tp_size=tp_size
            )
        )


def initial_values(
    spec: ParameterSpec, *, seed: int, name: str, tp_rank: int, tp_size: int
) -> Tensor:
    """Returns the values of one rank's shard, float32 on the CPU. Vocabulary padding is zero."""
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


def _normal_rows(
    spec: ParameterSpec, dim: int, start: int, length: int, *, seed: int, name: str
) -> Tensor:
    """Returns the normal draw of indices [start, start + length) of the whole tensor's `dim`."""
    assert spec.init_std is not None
    total = spec.global_shape[dim]
    block = -(-total // NUM_BLOCKS)
    drawn = []
    # A block that the shard cuts is drawn whole, so its numbers are the same at every TP size.
    for first in range(start // block * block, start + length, block):
        shape = list(spec.global_shape)
        shape[dim] = min(block, total - first)
        generator = torch.Generator().manual_seed(derive_seed("init", seed, name, first))
        drawn.append(torch.empty(shape).normal_(0.0, spec.init_std, generator=generator))
    return torch.cat(drawn, dim).narrow(dim, start % block, length)
