"""Profiles some iterations of a run, and records CUDA's allocations: `--profile` and its kin. Also
has the timers of the parts of a step.

torch's profiler writes one Chrome trace for each profiled rank, which chrome://tracing and Perfetto
open. Without it the iterations are marked for Nsight Systems:
`nsys profile --capture-range=cudaProfilerApi ...`.

The timers' text has the form of Megatron's log. Level 1 of `--timing-log-level` times the parts of
a step, level 2 also each micro-batch's parts. At level 0 nothing is timed. On a GPU a timer waits
for the device at its start and its end, so that it sees the work and not its launch. This makes a
step slower, which is why level 0 is the default.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch

from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.collectives import not_timed
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import record_memory_history, write_memory_history

MOST_ALLOCATIONS = 100_000  # of the memory history


class Profiler:
    """The profiler of this rank. Use `step` around every iteration, and call `close` at the end.

    say: writes a line to the log. The profiler issues no collective.
    """

    def __init__(
        self, config: RunConfig, parallel: ParallelState, say: Callable[[str], None]
    ) -> None:
        own, self._config, self._rank, self._say = config.profiling, config, parallel.rank, say
        on_cuda, mine = parallel.device.type == "cuda", own.of_rank(parallel.rank)
        self._is_due = own.profile and mine and (own.use_pytorch_profiler or on_cuda)
        self._keeps_history = own.record_memory_history and mine and on_cuda
        self._recording = ExitStack()
        self._mark: Callable[[str], AbstractContextManager[object]] = not_timed
        if self._keeps_history:
            record_memory_history(max_entries=MOST_ALLOCATIONS)

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Records the block if this iteration, counted from 1, is one to profile."""
        config = self._config.profiling
        if self._is_due and config.records(iteration):
            self._is_due = False
            if config.use_pytorch_profiler:
                recorded = torch.profiler.profile(
                    on_trace_ready=self._write,
                    record_shapes=config.pytorch_profiler_collect_shapes,
                    with_stack=config.pytorch_profiler_collect_callstack,
                )
                self._recording.enter_context(recorded)
                self._mark = torch.profiler.record_function
            else:
                self._recording.enter_context(torch.cuda.profiler.profile())
                self._mark = torch.cuda.nvtx.range
                if config.record_shapes or config.nvtx_ranges:
                    operators = torch.autograd.profiler.emit_nvtx(
                        record_shapes=config.record_shapes
                    )
                    self._recording.enter_context(operators)
        with self._mark(f"iteration {iteration}"):
            yield
        if iteration >= config.profile_step_end:
            self.close()
        if self._keeps_history and iteration % self._config.logging.log_interval == 0:
            given = Path(config.memory_snapshot_path)
            path = given.with_name(f"{given.stem}_{self._rank}{given.suffix}")
            try:
                write_memory_history(str(path))
            except OSError as error:
                self._say(f"warning: {path}: no memory snapshot is written ({error.strerror})")

    def close(self) -> None:
        """Ends a recording that still runs, and writes it."""
        self._mark = not_timed
        self._recording.close()

    def _write(self, recorded: torch.profiler.profile) -> None:
        folder = self._config.logging.tensorboard_dir or self._config.checkpoint.save or "."
        path = Path(folder, "torch_profile", f"rank-{self._rank}.json.gz")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            self._say(f"warning: {path}: the profile cannot be written ({error})")
        else:
            self._say(f"profile of rank {self._rank} written to {path}")


# By Megatron's name of the timer, in the order of its log: the level from which it runs.
LEVELS = {
    "forward-backward": 1,
    "all-grads-sync": 1,
    "params-all-gather": 1,
    "optimizer-clip-main-grad": 1,
    "optimizer-inner-step": 1,
    "optimizer-copy-main-to-model-params": 1,
    "optimizer": 1,
    "batch-generator": 2,
    "forward-compute": 2,
    "backward-compute": 2,
}


def times_text(times: Mapping[str, Sequence[float]], option: str) -> str:
    """Returns Megatron's lines. Ranks that have not used a timer are left out.

    times: by the name of the timer, the milliseconds of each rank.
    option: "minmax", "max" or "all", the form of the text.
    """
    what = {"minmax": "(min, max) time", "max": "max time", "all": "times"}[option]
    lines = [f"{what} across ranks (ms):"]
    for name, of_ranks in times.items():
        used = {rank: ms for rank, ms in enumerate(of_ranks) if ms > 0.0}
        if option == "all":
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {ms:.2f}" for rank, ms in used.items()]
            continue
        text = f"{max(used.values()):.2f}"
        if option == "minmax":
            text = f"({min(used.values()):.2f}, {text})"
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {text}")
    return "\n".join(lines)


class Timers:
    """The timers of this rank. Calling an object with a name returns the context to be timed."""

    def __init__(self, level: int, parallel: ParallelState) -> None:
        self._parallel = parallel
        self._seconds = {name: 0.0 for name, least in LEVELS.items() if least <= level}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time of its block to the timer of this name, if it runs at this level."""
        if name not in self._seconds:
            yield
            return
        began = self._now()
        yield
        self._seconds[name] += self._now() - began

    def _now(self) -> float:
        if self._parallel.device.type == "cuda":
            torch.cuda.synchronize(self._parallel.device)
        return time.perf_counter()

    def report(self, num_iterations: int) -> dict[str, tuple[float, ...]]:
        """Returns the milliseconds of an iteration, on average since the last report, and resets
        all timers. They are those of each rank by the name of the timer; a timer that no rank has
        used is missing.

        Every rank must call this. It gathers a number for each timer of each rank, on the CPU.
        num_iterations: how many iterations the times are the sum of.
        """
        own = [1000.0 * seconds / num_iterations for seconds in self._seconds.values()]
        of_timers = zip(*self._parallel.gathered(own), strict=True)
        times = dict(zip(self._seconds, of_timers, strict=True))
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return {name: of_ranks for name, of_ranks in times.items() if max(of_ranks) > 0.0}
