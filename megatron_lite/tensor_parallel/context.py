"""What a sharded layer needs to know of its surroundings, handed to its constructor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from megatron_lite.parallel.chunks import ContextParallel
from megatron_lite.parallel.rng import DEFAULT, TENSOR_PARALLEL, RngStreams
from megatron_lite.parallel.state import ParallelState


@dataclass(frozen=True, kw_only=True)
class TensorParallelContext:
    """A rank's place in its TP group, whether the sequence is sharded there too, and where parameters live.

    cp: its place among the ranks that share each sequence.
    """

    rng: RngStreams
    device: torch.device
    params_dtype: torch.dtype
    group: ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence_parallel: bool = False
    cp: ContextParallel = field(default_factory=ContextParallel)

    @classmethod
    def of(cls, parallel: ParallelState, *, sequence_parallel: bool, params_dtype: torch.dtype,
           cp_comm_type: str = "p2p") -> TensorParallelContext:
        """The context of this rank."""
        return cls(rng=parallel.rng, group=parallel.tp_group, rank=parallel.tp_rank, size=parallel.tp_size,
                   sequence_parallel=sequence_parallel and parallel.tp_size > 1, device=parallel.device,
                   params_dtype=params_dtype,
                   cp=ContextParallel(group=parallel.cp_group, rank=parallel.cp_rank, size=parallel.cp_size,
                                      comm_type=cp_comm_type))

    @property
    def residual_stream(self) -> str:
        """The RNG stream of draws on the residual stream: per rank where each rank holds other tokens, else shared."""
        return TENSOR_PARALLEL if self.sequence_parallel else DEFAULT
