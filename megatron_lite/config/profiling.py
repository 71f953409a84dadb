"""The settings of profilers and memory snapshots, as one frozen class."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.setting import check_settings, setting


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

    profile: bool = setting(
        "profile some iterations, for Nsight Systems or with --use-pytorch-profiler", False
    )
    profile_step_start: int = setting("the iteration after which profiling begins", 10, least=0)
    profile_step_end: int = setting("the last iteration that is profiled", 12)
    profile_ranks: tuple[int, ...] = setting(
        "global ranks to profile; all if omitted", (), nargs="+"
    )
    use_pytorch_profiler: bool = setting(
        "write a Chrome trace of each rank to torch_profile/ under --tensorboard-dir, else --save",
        False,
    )
    pytorch_profiler_collect_shapes: bool = setting("shapes of tensors in the trace", False)
    pytorch_profiler_collect_callstack: bool = setting("Python's stack in the trace", False)
    record_shapes: bool = setting("operators with shapes for Nsight Systems", False)
    nvtx_ranges: bool = setting("operators for Nsight Systems", False)
    record_memory_history: bool = setting(
        "write CUDA's allocations to --memory-snapshot-path at each --log-interval", False
    )
    memory_snapshot_path: str = setting(
        "file for them; _RANK is put before its last suffix", "snapshot.pickle", is_path=True
    )

    def __post_init__(self) -> None:
        check_settings(self)
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
