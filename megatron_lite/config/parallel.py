"""How the work is split over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_lite.config.checks import flag, require_at_least, require_one_of

DISTRIBUTED_BACKENDS = ("auto", "nccl", "gloo")
CP_COMM_TYPES = ("p2p", "allgather")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the mesh axes. The data-parallel size is what remains of the world.

    num_layers_per_virtual_pipeline_stage or num_virtual_stages_per_pipeline_rank: two ways to give each pipeline rank several
    shorter stages. decoder_first_pipeline_num_layers, decoder_last_..: layers of the first and last pipeline rank; the others
    share the rest. `distributed_backend="auto"` is nccl where CUDA is used and gloo elsewhere; "gloo" also keeps the run on the
    CPU. config/stages.py has the layers of each stage. cp_comm_type: how context-parallel ranks exchange keys and values, around
    a ring ("p2p") or all at once ("allgather"). distributed_timeout_seconds_after_init: from the second iteration on.
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    overlap_p2p_comm: bool = True
    context_parallel_size: int = 1
    cp_comm_type: str = "p2p"
    distributed_backend: str = "auto"
    distributed_timeout_minutes: int = 10
    distributed_timeout_seconds_after_init: int | None = None

    def __post_init__(self) -> None:
        require_at_least(self, 1, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
                         "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
                         "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "distributed_timeout_minutes",
                         "distributed_timeout_seconds_after_init")
        require_one_of(self, "distributed_backend", DISTRIBUTED_BACKENDS)
        self._check_context_parallel()
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            object.__setattr__(self, "sequence_parallel", False)
        if self.num_layers_per_virtual_pipeline_stage is not None and self.num_virtual_stages_per_pipeline_rank is not None:
            raise ValueError("--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank both give the "
                             "number of virtual stages: set one")
        if self.num_virtual_stages_per_pipeline_rank == 1:
            object.__setattr__(self, "num_virtual_stages_per_pipeline_rank", None)
        for field in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
                      "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
            if getattr(self, field) is not None and self.pipeline_model_parallel_size == 1:
                raise ValueError(f"{flag(field)} needs --pipeline-model-parallel-size > 1 (got 1)")

    def _check_context_parallel(self) -> None:
        if self.cp_comm_type in ("a2a", "a2a+p2p"):
            raise ValueError(f"--cp-comm-type {self.cp_comm_type} is not supported: it splits the heads over context-parallel "
                             "ranks during attention, and here each rank keeps its heads; use p2p or allgather")
        require_one_of(self, "cp_comm_type", CP_COMM_TYPES)
        if self.cp_comm_type != "p2p" and self.context_parallel_size == 1:
            raise ValueError(f"--cp-comm-type {self.cp_comm_type} needs --context-parallel-size > 1 (got 1)")

    @property
    def timeout_seconds(self) -> float:
        """What a collective may take once the first iteration is done."""
        return self.distributed_timeout_seconds_after_init or 60.0 * self.distributed_timeout_minutes

    @property
    def sequence_parts(self) -> int:
        """What --seq-length must be a multiple of: two chunks a context-parallel rank, each split under sequence parallelism."""
        chunks = 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1
        return chunks * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    def data_parallel_size(self, world_size: int) -> int:
        """World size / the ranks of one model. ValueError where it does not divide, with the arithmetic."""
        axes = {"--tensor-model-parallel-size": self.tensor_model_parallel_size,
                "--context-parallel-size": self.context_parallel_size,
                "--pipeline-model-parallel-size": self.pipeline_model_parallel_size}
        ranks = math.prod(axes.values())
        if world_size % ranks:
            named = [f"{name} {size}" for name, size in axes.items() if size > 1]
            product = " x ".join(named) + (f" = {ranks}" if len(named) > 1 else "")
            raise ValueError(f"world size {world_size} is not a multiple of {product}: start a multiple of {ranks} processes "
                             "(torchrun --nproc_per_node, srun --ntasks)")
        return world_size // ranks
