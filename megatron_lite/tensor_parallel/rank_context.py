"""The surroundings of a sharded layer, passed to its constructor."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from megatron_lite.parallel.compiled import Kernels
from megatron_lite.parallel.parameter_spec import ParameterSpec, mark
from megatron_lite.parallel.rng import DEFAULT, TENSOR_PARALLEL
from megatron_lite.parallel.sequence_spans import spans_of
from megatron_lite.parallel.state import ParallelState


@dataclass(frozen=True, kw_only=True)
class RankContext(ParallelState):
    """A rank's place in the run, and how its layers create parameters and compute.

    params_dtype: the dtype of new parameters.
    sequence_parallel: whether the sequence is sharded over the TP group between sharded layers.
    cp_comm_type: how keys and values reach the other context-parallel ranks (--cp-comm-type): of
        every layer, or a value for each.
    kernels: the compiled kernels of norms, activations, rotary embedding and dropout; None: torch's
        operators. loss_kernels: those of the loss.
    """

    params_dtype: torch.dtype
    sequence_parallel: bool = False
    cp_comm_type: str | tuple[str, ...] = "p2p"
    kernels: Kernels = None
    loss_kernels: Kernels = None

    @classmethod
    def of(
        cls, parallel: ParallelState, *, sequence_parallel: bool, **settings: Any
    ) -> RankContext:
        """Returns the context of a rank. A TP group of one rank has no sequence parallelism.

        settings: the other fields of the context.
        """
        place = {field.name: getattr(parallel, field.name) for field in fields(parallel)}
        is_split = sequence_parallel and parallel.tp_size > 1
        return cls(**place, sequence_parallel=is_split, **settings)

    def new_parameter(self, *global_shape: int, **settings: Any) -> nn.Parameter:
        """Returns an uninitialised parameter that holds this rank's shard and carries its spec.

        settings: the other fields of ParameterSpec.
        """
        spec = ParameterSpec(global_shape=global_shape, **settings)
        place = self.holding(spec)
        shape = spec.local_shape(place.tp_size, place.ep_size)
        local = torch.empty(shape, dtype=self.params_dtype, device=self.device)
        return mark(nn.Parameter(local), spec)

    def spans(self, num_tokens: int) -> tuple[slice, ...]:
        """Returns the positions of this rank's `num_tokens` tokens of each sequence."""
        return spans_of(self.cp_size * num_tokens, rank=self.cp_rank, size=self.cp_size)

    @property
    def residual_stream(self) -> str:
        """The name of the RNG stream for dropout on the residual stream.

        It differs per TP rank if each rank holds different tokens (sequence parallelism).
        """
        return TENSOR_PARALLEL if self.sequence_parallel else DEFAULT
