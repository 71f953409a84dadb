"""The checkpoints of one run: the one that it loads, and those that it saves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from megatron_lite.checkpointing.load import Loaded, load_checkpoint
from megatron_lite.checkpointing.metadata import Progress
from megatron_lite.checkpointing.saver import Saver
from megatron_lite.checkpointing.snapshot import take_snapshot
from megatron_lite.checkpointing.start import Start
from megatron_lite.config.run import RunConfig
from megatron_lite.data.datasets import Datasets
from megatron_lite.model.stage_models import ModelStages
from megatron_lite.optim.lr_schedule import LrSchedule
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.state import ParallelState
from megatron_lite.supervision.pulse import Pulse
from megatron_lite.training.logging import RunLog
from megatron_lite.training.processor import described, moved_notices
from megatron_lite.training.step import TrainingError


@dataclass(kw_only=True)
class RunCheckpoints:
    """Loads and saves the state of one run. Every rank makes the same calls.

    tokenizer: the contents of the tokenizer's files, which every checkpoint stores.
    compare_replicas: called with the iteration. It raises TrainingError if ranks no longer hold the
        same weights.
    saved_at: the iteration of the last checkpoint, or -1.
    computes_on: this rank's processor and libraries, which decide the low bits of the results.
    """

    config: RunConfig
    parallel: ParallelState
    model: ModelStages
    optimizer: Optimizer
    schedule: LrSchedule
    datasets: Datasets
    saver: Saver
    tokenizer: Mapping[str, bytes]
    pulse: Pulse
    compare_replicas: Callable[[int], None]
    saved_at: int = -1
    computes_on: str = field(init=False)

    def __post_init__(self) -> None:
        self.computes_on = described(self.parallel.device)

    def load(self, start: Start) -> Loaded | None:
        """Loads the step that `--load` chose. Returns its progress, or None without `--load`."""
        if self.config.checkpoint.load is None:
            return None
        loaded = load_checkpoint(
            start,
            self.config,
            self.parallel,
            self.model,
            self.optimizer,
            data=self.datasets.identity,
        )
        if self.config.checkpoint.continues:
            self.saved_at = loaded.progress.iteration
            notices = moved_notices(loaded.computed_on, self.computes_on)
            return replace(loaded, notices=(*loaded.notices, *notices))
        return loaded

    def save(self, progress: Progress, log: RunLog) -> None:
        """Saves the run under `--save`, unless this iteration has been saved already.

        Raises TrainingError if a weight is not finite. If a rank cannot write, a line of the log
        says so, and the run goes on.
        """
        directory, iteration = self.config.checkpoint.save, progress.iteration
        if directory is None or iteration == 0:
            return
        self.saver.wait(log.line)
        if iteration == self.saved_at and self.saver.failure is None:
            return
        if not math.isfinite(self.optimizer.params_norm().item()):
            raise TrainingError(
                f"iteration {iteration}: a weight is not finite, so no checkpoint is written. "
                "Lower --lr, and continue from an earlier checkpoint"
            )
        self.compare_replicas(iteration)
        self.pulse.at(f"iteration {iteration} (saving)", limited=False)
        log.line(f"saving checkpoint at iteration {iteration:7d} to {directory}")
        began = time.perf_counter()
        with log.slow("saving the checkpoint"):
            snapshot = take_snapshot(
                self.config,
                self.parallel,
                self.model,
                self.optimizer,
                progress,
                data=self.datasets.identity,
                copy=self.saver.copies,
                schedule=self.schedule,
                computed_on=self.computes_on,
                tokenizer=self.tokenizer,
            )
            self.saver.save(snapshot, log.line)
        if self.saver.copies:
            log.line(
                f"  training waited {(time.perf_counter() - began) * 1000.0:.1f} ms for the "
                "copy, which is now written"
            )
        self.saved_at = iteration
