"""How the work is split over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.checks import require_at_least, require_one_of

DISTRIBUTED_BACKENDS = ("auto", "nccl", "gloo")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the mesh axes. The data-parallel size is what remains: world size / tensor-parallel size.

    `distributed_backend="auto"` is nccl where CUDA is used and gloo elsewhere; "gloo" also keeps the run on the CPU.
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    distributed_backend: str = "auto"
    distributed_timeout_minutes: int = 10

    def __post_init__(self) -> None:
        require_at_least(self, 1, "tensor_model_parallel_size", "distributed_timeout_minutes")
        require_one_of(self, "distributed_backend", DISTRIBUTED_BACKENDS)
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            object.__setattr__(self, "sequence_parallel", False)

    def data_parallel_size(self, world_size: int) -> int:
        """World size / tensor-parallel size. ValueError where it does not divide."""
        if world_size % self.tensor_model_parallel_size:
            raise ValueError(f"world size {world_size} is not divisible by --tensor-model-parallel-size "
                             f"{self.tensor_model_parallel_size}: start a multiple of "
                             f"{self.tensor_model_parallel_size} processes (torchrun --nproc_per_node, srun --ntasks)")
        return world_size // self.tensor_model_parallel_size
