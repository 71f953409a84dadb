"""Initial weights that are the same at every TP size.

They depend only on the seed, the parameter's name and its global shape. The whole tensor is cut
into at most 64 blocks along its split dim. Each block is drawn on the CPU in float32, from its own
generator. A rank draws only the blocks that overlap its shard, so t ranks split the work of a large
model, and the threads of a rank draw the blocks of a large tensor side by side.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from megatron_lite.parallel.parameter_spec import ParameterSpec, spec_of
from megatron_lite.parallel.rng import derive_seed
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import is_fake

NUM_BLOCKS = 64
LARGE = 2**20  # elements of a block: drawing them takes milliseconds


@torch.no_grad()
def initialize_parameters_(model: nn.Module, parallel: ParallelState, *, seed: int) -> None:
    """Fills every parameter of `model` as its ParameterSpec describes.

    Draws from none of the run's random-number streams. Fake parameters, which have no values, are
    left as they are.
    """
    for name, parameter in model.named_parameters():
        if is_fake(parameter):
            continue
        spec = spec_of(parameter)
        parameter.copy_(initial_values(spec, parallel.holding(spec), seed=seed, name=name))


def initial_values(spec: ParameterSpec, place: ParallelState, *, seed: int, name: str) -> Tensor:
    """Returns the values of one rank's shard, float32 on the CPU. Vocabulary padding is zero.

    place: that of the rank for this parameter. It draws whole experts, and takes its channels.
    """
    shape = spec.local_shape(place.tp_size, place.ep_size)
    local, std = torch.full(shape, spec.init_value, dtype=torch.float32), spec.init_std
    if std is None:
        return local

    def draw(dim: int, start: int, length: int) -> Tensor:
        """Returns the normal draw of indices [start, start + length) of the whole tensor's dim."""
        total = spec.global_shape[dim]
        block = -(-total // NUM_BLOCKS)

        # A block that the shard cuts is drawn whole: its numbers are the same at every TP size.
        def drawn(first: int) -> Tensor:
            shape = list(spec.global_shape)
            shape[dim] = min(block, total - first)
            generator = torch.Generator().manual_seed(derive_seed("init", seed, name, first))
            return torch.empty(shape).normal_(0.0, std, generator=generator)

        firsts = range(start // block * block, start + length, block)
        workers = torch.get_num_threads()
        if workers > 1 and math.prod(spec.global_shape) // total * block >= LARGE:
            with ThreadPoolExecutor(workers) as pool:
                blocks = list(pool.map(drawn, firsts))
        else:
            blocks = list(map(drawn, firsts))
        return torch.cat(blocks, dim).narrow(dim, start % block, length)

    first = place.ep_rank * shape[0]  # 0 for other parameters than those of experts
    if spec.tp_dim is None:
        return draw(0, first, shape[0])
    rows = draw(0, first, shape[0]).narrow if spec.of_experts else draw
    local.zero_()
    for span in spec.spans(place.tp_rank, place.tp_size):
        local.narrow(spec.tp_dim, span.local_start, span.length).copy_(
            rows(spec.tp_dim, span.global_start, span.length)
        )
    return local
