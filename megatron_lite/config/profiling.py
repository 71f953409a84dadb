"""The settings of profilers and memory snapshots, as one frozen class."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.checks import require_at_least, require_not_empty


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """The settings of what a run records about itself.

    profile_step_start, profile_step_end: S and E. The iterations S + 1 to E are profiled.
    profile_ranks: the global ranks that are profiled. An empty tuple: all ranks.
    use_pytorch_profiler: whether torch's profiler records. Otherwise the iterations are marked for
        NVIDIA's Nsight Systems, on CUDA only.
    record_shapes, nvtx_ranges: whether Nsight Systems sees each operator, with or without shapes.
    record_memory_history: whether CUDA's allocations are recorded and written to
        memory_snapshot_path, with the rank in the name, at each --log-interval.
    """

    profile: bool = False
    profile_step_start: int = 10
    profile_step_end: int = 12
    profile_ranks: tuple[int, ...] = ()
    use_pytorch_profiler: bool = False
    pytorch_profiler_collect_shapes: bool = False
    pytorch_profiler_collect_callstack: bool = False
    record_shapes: bool = False
    nvtx_ranges: bool = False
    record_memory_history: bool = False
    memory_snapshot_path: str = "snapshot.pickle"

    def __post_init__(self) -> None:
        # argparse gives a list, and `from_json` a tuple: both must make equal values.
        object.__setattr__(self, "profile_ranks", tuple(self.profile_ranks))
        require_at_least(self, 0, "profile_step_start")
        require_not_empty(self, "memory_snapshot_path")
        if any(rank < 0 for rank in self.profile_ranks):
            raise ValueError(
                f"--profile-ranks {' '.join(map(str, self.profile_ranks))}: give numbers of ranks, "
                "from 0 on"
            )
        if self.profile and self.profile_step_end <= self.profile_step_start:
            raise ValueError(
                f"--profile-step-end {self.profile_step_end} must be above --profile-step-start "
                f"{self.profile_step_start}: the iterations between them are profiled"
            )

    def of_rank(self, rank: int) -> bool:
        """Returns whether a profiler records the global rank `rank`, if the run has a profiler."""
        return not self.profile_ranks or rank in self.profile_ranks
