"""Profiles some iterations of a run, and records CUDA's allocations: `--profile` and its kin.

torch's profiler writes one Chrome trace for each profiled rank, which chrome://tracing and Perfetto
open. Without it the iterations are marked for Nsight Systems:
`nsys profile --capture-range=cudaProfilerApi ...`.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import record_memory_history, write_memory_history

MOST_ALLOCATIONS = 100_000  # of the memory history


class Profiler:
    """The profiler of this rank. Call `begin` and `end` around every iteration, and `close` last.

    It issues no collective.
    """

    def __init__(self, config: RunConfig, parallel: ParallelState) -> None:
        self._config, self._rank = config.profiling, parallel.rank
        on_cuda, mine = parallel.device.type == "cuda", config.profiling.of_rank(parallel.rank)
        traces = config.profiling.use_pytorch_profiler
        self._is_due = config.profiling.profile and mine and (traces or on_cuda)
        self._keeps_history = config.profiling.record_memory_history and mine and on_cuda
        self._log_interval = config.logging.log_interval
        folder = config.logging.tensorboard_dir or config.checkpoint.save or "."
        self._trace = Path(folder) / "torch_profile" / f"rank-{self._rank}.json.gz"
        self._torch: Any = None
        self._marks: ExitStack | None = None  # ends the marks for Nsight Systems
        if self._keeps_history:
            record_memory_history(max_entries=MOST_ALLOCATIONS)

    def begin(self, iteration: int) -> None:
        """Begins to record, if this iteration, counted from 1, is the first one to profile."""
        config = self._config
        if self._is_due and config.profile_step_start < iteration <= config.profile_step_end:
            self._is_due = False
            if config.use_pytorch_profiler:
                self._torch = torch.profiler.profile(
                    record_shapes=config.pytorch_profiler_collect_shapes,
                    with_stack=config.pytorch_profiler_collect_callstack,
                )
                self._torch.start()
            else:
                self._marks = ExitStack()
                torch.cuda.cudart().cudaProfilerStart()
                self._marks.callback(torch.cuda.cudart().cudaProfilerStop)
                if config.record_shapes or config.nvtx_ranges:
                    operators = torch.autograd.profiler.emit_nvtx(
                        record_shapes=config.record_shapes
                    )
                    self._marks.enter_context(operators)
        elif self._torch is not None:
            self._torch.step()  # a mark in the trace between two iterations
        if self._marks is not None:
            torch.cuda.nvtx.range_push(f"iteration {iteration}")

    def end(self, iteration: int) -> list[str]:
        """Ends the recording after the last iteration to profile. Returns lines for the log."""
        if self._marks is not None:
            torch.cuda.nvtx.range_pop()
        lines = [] if iteration < self._config.profile_step_end else self.close()
        if self._keeps_history and iteration % self._log_interval == 0:
            given = Path(self._config.memory_snapshot_path)
            path = given.with_name(f"{given.stem}_{self._rank}{given.suffix}")
            try:
                write_memory_history(str(path))
            except OSError as error:
                lines.append(f"warning: {path}: no memory snapshot is written ({error.strerror})")
        return lines

    def close(self) -> list[str]:
        """Ends a recording that still runs, and writes it. Returns lines for the log."""
        if self._marks is not None:
            self._marks.close()
            self._marks = None
        recorded, self._torch = self._torch, None
        if recorded is None:
            return []
        recorded.stop()
        try:
            self._trace.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(self._trace))
        except (OSError, RuntimeError) as error:
            return [f"warning: {self._trace}: the profile cannot be written ({error})"]
        return [f"profile of rank {self._rank} written to {self._trace}"]
