"""Profiles some iterations of a run, and records CUDA's allocations: `--profile` and its kin. Also
measures the peak of a step, records the memory timeline of a micro-batch, and has the timers of the
parts of a step.

torch's profiler writes one Chrome trace for each profiled rank, which chrome://tracing and Perfetto
open. Without it the iterations are marked for Nsight Systems:
`nsys profile --capture-range=cudaProfilerApi ...`.

The timers' text has the form of Megatron's log. Level 1 of `--timing-log-level` times the parts of
a step, level 2 also each micro-batch's parts. At level 0 nothing is timed. On a GPU a timer waits
for the device at its start and its end, so that it sees the work and not its launch. This makes a
step slower, which is why level 0 is the default.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.checks import chosen
from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import size
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.stage_course import kept_course
from megatron_lite.memory.predict.step_peak import StepPeak
from megatron_lite.model.gpt import GPTModel, ModelStages
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.collectives import (
    all_gather_first_dim,
    all_reduce_,
    gloo_has_freed,
    not_timed,
)
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import (
    address_of,
    record_memory_history,
    write_memory_history,
)
from megatron_lite.parallel.weights import local_part

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


class PeakMemory(NamedTuple):
    """The peak of a step on the rank that holds most.

    predicted, measured: bytes.
    reserved: on CUDA, the most that the allocator held of the device, with its free pieces; else 0.
    """

    predicted: int
    measured: int
    reserved: int = 0

    def __str__(self) -> str:
        return (
            f"{size(self.measured)} measured, {size(self.predicted)} predicted "
            f"({self.predicted / max(1, self.measured):.1%} of it)"
            + (f"; {size(self.reserved)} reserved" if self.reserved else "")
        )


class PeakMeter:
    """Measures the peak of one step of this rank."""

    def __init__(self, model: ModelStages, optimizer: Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._peak_bytes = self._reserved_bytes = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measures the block, which is one step."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self._peak_bytes = torch.cuda.max_memory_allocated(self._device)
            self._reserved_bytes = torch.cuda.max_memory_reserved(self._device)
            return
        # The profiler does not see what was allocated before, such as the buffers of @host and the
        # slots of --contiguous-saved-activations, which the first step made.
        held_tensors = map(local_part, _held_tensors(self._model, self._optimizer))
        storages = [one.untyped_storage() for one in held_tensors]
        held = sum({address_of(one): one.nbytes() for one in storages}.values()) + sum(
            chunk.decoder.stores.allocated_bytes
            for chunk in self._model
            if chunk.decoder.plan.uses_stores
        )
        from megatron_lite.memory.measure.live_storages import allocator_peak

        with gloo_has_freed(), allocator_peak() as found:
            yield
            self._optimizer.finish()  # gathers of weights; a profiler must not end beside them
        self._peak_bytes = held + found.peak_bytes

    def result(self, predicted: StepPeak, parallel: ParallelState) -> PeakMemory:
        """Returns the largest figures of any rank, once the step is over. predicted: this rank's.

        Every rank must call it: it issues one all-reduce over all ranks. Waits for the device.
        """
        figures = torch.tensor(
            (predicted.num_bytes, self._peak_bytes, self._reserved_bytes), device=parallel.device
        )
        return PeakMemory(*all_reduce_(figures, parallel.world_group, dist.ReduceOp.MAX).tolist())


def _held_tensors(model: ModelStages, optimizer: Optimizer) -> Iterator[Tensor]:
    """Yields the tensors that this rank holds from step to step."""
    for chunk in model:
        yield from chunk.parameters()
        yield from chunk.constants()
    # Without a buffer (FSDP2) a step begins with new gradients.
    if isinstance(optimizer.layout.gradients, GradBuffer):
        yield from optimizer.layout.gradients.grads.values()
    for piece in optimizer.layout.pieces:
        yield piece.master
    yield from optimizer.host_tensors()
    for states in optimizer.states.values():
        yield from states.values()


def record_step(path: str, config: RunConfig, model: GPTModel, run: Callable[[], Tensor]) -> Tensor:
    """Writes the memory timeline of a micro-batch of a whole model, and the predicted bytes.

    Runs the forward `run` and its backward. Returns the loss, detached.
    """
    # Imported here because the import takes seconds.
    from megatron_lite.memory.measure.recorder import record_timeline
    from megatron_lite.memory.measure.timeline import write_timeline

    losses = []

    def noted() -> Tensor:
        loss = run()
        losses.append(loss.detach())
        return loss

    timeline = record_timeline(model, noted, name=str(config.recompute.policy))
    sizes = Sizes.of(config, device=losses[0].device.type, stage=model.stage)
    predicted = tuple(kept_course(config.model, model.decoder.plan, sizes))
    write_timeline(timeline._replace(predicted=predicted), path)
    return losses[0]


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


class Times(NamedTuple):
    """The milliseconds of an iteration, on average since the last report.

    ranks: by the name of the timer, those of each rank. A timer that no rank has used is missing.
    option: "minmax", "max" or "all", the form of the text.
    """

    ranks: dict[str, list[float]]
    option: str

    def __str__(self) -> str:
        """Megatron's lines. Ranks that have not used a timer are left out."""
        used = {
            name: [(rank, ms) for rank, ms in enumerate(times) if ms > 0.0]
            for name, times in self.ranks.items()
        }
        if self.option == "all":
            lines = ["times across ranks (ms):"]
            for name, times in used.items():
                lines.append(f"  {name}:")
                lines += [f"     rank {rank:2d}: {ms:.2f}" for rank, ms in times]
            return "\n".join(lines)
        title = "(min, max)" if self.option == "minmax" else "max"
        lines = [f"{title} time across ranks (ms):"]
        for name, times in used.items():
            least, most = (choose(ms for _, ms in times) for choose in (min, max))
            text = f"({least:.2f}, {most:.2f})" if self.option == "minmax" else f"{most:.2f}"
            lines.append(f"    {(name + ' ').ljust(48, '.')}: {text}")
        return "\n".join(lines)


class Timers:
    """The timers of this rank. Calling an object with a name returns the context to be timed.

    clock: returns the seconds of a clock.
    """

    def __init__(
        self,
        config: LoggingConfig,
        parallel: ParallelState,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._level, self._option = config.timing_log_level, config.timing_log_option
        self._parallel, self._clock = parallel, clock
        self._seconds = {name: 0.0 for name, level in LEVELS.items() if level <= self._level}

    def __call__(self, name: str) -> AbstractContextManager[object]:
        """Returns a context manager that adds the time of its block to the timer of this name."""
        if chosen("the timer", name, LEVELS) > self._level:
            return not_timed(name)
        return self._timed(name)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = self._now()
        try:
            yield
        finally:
            self._seconds[name] += self._now() - began

    def _now(self) -> float:
        if self._parallel.device.type == "cuda":
            torch.cuda.synchronize(self._parallel.device)
        return self._clock()

    def report(self, num_iterations: int) -> Times | None:
        """Returns the times since the last report, and resets all timers.

        Every rank must call this. It issues one all-gather of a number for each timer and rank, on
        the CPU.
        num_iterations: how many iterations the times are the sum of.
        """
        own = [1000.0 * seconds / num_iterations for seconds in self._seconds.values()]
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        gathered = all_gather_first_dim(
            torch.tensor([own], dtype=torch.float64), self._parallel.world_group
        )
        ranks = {
            name: times
            for name, times in zip(self._seconds, gathered.T.tolist(), strict=True)
            if max(times) > 0.0
        }
        return Times(ranks, self._option) if ranks else None
