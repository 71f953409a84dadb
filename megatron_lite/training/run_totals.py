"""The totals of one start of a run, and the lines about them at its end."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lite.checkpointing.metadata import Progress
from megatron_lite.checkpointing.step_files import step_directory
from megatron_lite.config.invocation import SCRIPT, subcommand
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import size
from megatron_lite.training.evaluate import Evaluation
from megatron_lite.training.iteration_line import RunFacts, clock, mean_loss
from megatron_lite.training.log_file import log_file_path
from megatron_lite.training.metrics import IterationRecord
from megatron_lite.training.run_summary import RunSummary
from megatron_lite.training.skipped import skipped_batches_path

LABEL = 13
LAST = 10  # iterations over which the last loss is a mean


@dataclass
class RunTotals:
    """Adds up the iterations of one start, and notes its evaluations.

    program: the name of the program that the user started.
    best: the iteration and the result of the lowest validation loss.
    """

    facts: RunFacts
    program: str = SCRIPT
    began: float = field(default_factory=time.monotonic)
    iterations: int = 0
    samples: int = 0
    milliseconds: float = 0.0
    skipped: int = 0
    last: list[IterationRecord] = field(default_factory=list)
    best: tuple[int, Evaluation] | None = None

    def add(self, record: IterationRecord) -> None:
        """Adds an iteration."""
        self.iterations += 1
        self.samples += record.global_batch_size
        self.milliseconds += record.iteration_ms
        self.skipped += record.skipped
        self.last = [*self.last[-(LAST - 1) :], record]

    def evaluated(self, name: str, iteration: int, result: Evaluation) -> None:
        """Notes a validation loss, if it is the best one so far. A test loss does not count."""
        better = self.best is None or result.loss < self.best[1].loss
        if name == "validation" and math.isfinite(result.loss) and better:
            self.best = (iteration, result)

    def lines(
        self, config: RunConfig, progress: Progress, summary: RunSummary, *, finished: bool
    ) -> list[str]:
        """Returns the lines at the end of the run.

        progress: where the run is. summary: its predictions. finished: whether it is complete.
        """
        word = "finished" if finished else "stopped"
        rows = [
            (
                f"{word} at iteration {progress.iteration} of {self.facts.num_iterations} after "
                f"{clock(time.monotonic() - self.began)}, with evaluations and saves"
            )
        ]
        details = [
            *(self._of_training() if self.last else ()),
            *_of_memory(self.last, summary, config),
            *self._of_files(config, progress),
        ]
        return [*rows, *(f"  {label:{LABEL}}{text}" for label, text in details)]

    def _of_training(self) -> Iterator[tuple[str, str]]:
        seconds, facts = self.milliseconds / 1000.0, self.facts
        tokens = self.samples * facts.tokens // facts.batch_size
        share = ""
        if facts.peak_flops is not None:
            flops = facts.flops * self.samples / facts.batch_size
            share = f", MFU {100.0 * flops / (facts.peak_flops * facts.world_size * seconds):.1f}%"
        yield (
            "trained",
            f"{self.samples:,} samples, {tokens:,} tokens in {clock(seconds)}: "
            f"{tokens / seconds:,.0f} tokens/s{share}",
        )
        count = len(self.last)
        mean = "of the last iteration" if count == 1 else f"(mean of the last {count} iterations)"
        yield "loss", f"{mean_loss(self.last):.4f} {mean}"
        if self.best is not None:
            iteration, result = self.best
            yield (
                "validation",
                f"best loss {result.loss:.4f} (perplexity {result.perplexity:.3f}) at iteration "
                f"{iteration}",
            )

    def _of_files(self, config: RunConfig, progress: Progress) -> Iterator[tuple[str, str]]:
        if self.iterations:
            listed = skipped_batches_path(config) if self.skipped else None
            yield (
                "skipped",
                f"{self.skipped or 'no'} update{'' if self.skipped == 1 else 's'}"
                + ("" if listed is None else f", listed in {listed}"),
            )
        save, logging = config.checkpoint.save, config.logging
        if save is not None and progress.iteration:
            yield "checkpoint", str(step_directory(Path(save), progress.iteration))
        log = log_file_path(config)
        if log is not None:
            yield "log", log.path
        if logging.metrics_jsonl is not None:
            paths = [logging.metrics_jsonl, *([] if log is None else [log.path])]
            yield "report", shlex.join([*subcommand(self.program, "report"), *paths])


def _of_memory(
    last: list[IterationRecord], summary: RunSummary, config: RunConfig
) -> Iterator[tuple[str, str]]:
    if last and (measured := last[-1].activation_bytes_measured) is not None:
        predicted = last[-1].activation_bytes_predicted or 0
        told = "as predicted to the byte"
        if predicted != measured:
            told = f"{size(predicted)} were predicted"
        yield "kept", f"{size(measured)} for backward by a micro-batch, {told}"
    parts = dict(summary.parts())
    if "peak of a step" in parts:
        yield "peak", parts["peak of a step"]
    elif last and not config.training.torch_compile:
        by_flag = " (--log-peak-memory measures it)" if not config.logging.log_peak_memory else ""
        yield "peak", f"not measured{by_flag}"
    if "time of a step" in parts:
        yield "step time", parts["time of a step"]
