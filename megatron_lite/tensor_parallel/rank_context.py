"""The surroundings of a sharded layer, passed to its constructor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.parallel.rng import DEFAULT, TENSOR_PARALLEL, RngStreams
from megatron_lite.parallel.sequence_spans import ContextParallel
from megatron_lite.parallel.state import ParallelState


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """A rank's place in its TP and CP groups, and how and where its layers create parameters.

    rng: the random-number streams of this rank.
    device, params_dtype: the device and the dtype of new parameters.
    group, rank, size: the TP group (None for one rank), this rank's place in it, and its size.
    sequence_parallel: whether the sequence is sharded over the TP group between sharded layers.
    cp: the rank's place among the ranks that split each sequence.
    dp_group: the ranks that hold other micro-batches; None for one rank.
    experts: the place of this rank for the parameters of experts; None: that for all others.
    kernels: the compiled kernels of norms, activations, rotary embedding and dropout; None: torch's
        operators. loss_kernels: those of the loss, by default the same.
    """

    rng: RngStreams
    device: torch.device
    params_dtype: torch.dtype
    group: ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence_parallel: bool = False
    cp: ContextParallel = field(default_factory=ContextParallel)
    dp_group: ProcessGroup | None = None
    experts: ParallelState | None = None
    kernels: CompiledKernels | None = None
    loss_kernels: CompiledKernels | None = None

    @classmethod
    def of(
        cls,
        parallel: ParallelState,
        *,
        sequence_parallel: bool,
        params_dtype: torch.dtype,
        cp_comm_type: str | tuple[str, ...] = "p2p",
        kernels: CompiledKernels | None = None,
        loss_kernels: CompiledKernels | None = None,
    ) -> RankContext:
        """Returns the context of this rank. A TP group of one rank has no sequence parallelism."""
        return cls(
            rng=parallel.rng,
            group=parallel.tp_group,
            rank=parallel.tp_rank,
            size=parallel.tp_size,
            sequence_parallel=sequence_parallel and parallel.tp_size > 1,
            device=parallel.device,
            params_dtype=params_dtype,
            cp=ContextParallel(
                group=parallel.cp_group,
                rank=parallel.cp_rank,
                size=parallel.cp_size,
                comm_type=cp_comm_type,
            ),
            dp_group=parallel.dp_group,
            experts=parallel.experts,
            kernels=kernels,
            loss_kernels=loss_kernels or kernels,
        )

    @property
    def residual_stream(self) -> str:
        """The name of the RNG stream for dropout on the residual stream.

        It differs per TP rank if each rank holds different tokens (sequence parallelism).
        """
        return TENSOR_PARALLEL if self.sequence_parallel else DEFAULT
