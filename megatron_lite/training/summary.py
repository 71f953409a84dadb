"""The end of a run: its totals, and what was predicted of its steps beside what was measured.

The last lines of the log have them as text. A JSON file beside the metrics, METRICS.summary.json,
has the predictions for other programs.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_lite.checkpointing.metadata import Progress
from megatron_lite.checkpointing.step_files import step_directory
from megatron_lite.config.invocation import subcommand
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import plural, size
from megatron_lite.data.durable_files import written_beside
from megatron_lite.parallel.state import ParallelState
from megatron_lite.training.iteration_line import Evaluation, Interval, IterationRecord, clock
from megatron_lite.training.log_files import log_file_path
from megatron_lite.training.peak_memory import PeakMemory
from megatron_lite.training.run_facts import RunFacts
from megatron_lite.training.skipped import skipped_batches_path

LAST = 10  # iterations over which the last loss is a mean
FIRST_STEPS = 2  # whose times do not count: kernels compile, and the peak is measured


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The figures of a run. A figure that is not known is None.

    peak_bytes_*: the peak of a step on the rank that holds most.
    step_ms_*: the time of a step; the measured one is the median of the steps after the second.
    machine: the name of the machine for which the time was predicted.
    """

    peak_bytes_predicted: int | None = None
    peak_bytes_measured: int | None = None
    step_ms_predicted: float | None = None
    step_ms_measured: float | None = None
    machine: str | None = None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        parallel: ParallelState,
        peak: PeakMemory | None,
        seconds: Sequence[float],
    ) -> RunSummary:
        """Returns the summary of a run. seconds: the times of all its steps."""
        machine, predicted, later = None, None, seconds[FIRST_STEPS:]
        if config.logging.machine is not None or parallel.device.type == "cuda":
            # Imported late: only such a run has a machine for which times are predicted.
            from megatron_lite.plan.hardware import load_hardware, machine_of_gpu
            from megatron_lite.plan.step_time import step_time

            if config.logging.machine is not None:
                machine = load_hardware(config.logging.machine)
            else:
                machine = machine_of_gpu(torch.cuda.get_device_name(parallel.device))
            if machine is not None:
                predicted = 1000.0 * step_time(config, machine, parallel.world_size).seconds
        return cls(
            peak_bytes_predicted=None if peak is None else peak.predicted,
            peak_bytes_measured=None if peak is None else peak.measured,
            step_ms_predicted=predicted,
            step_ms_measured=1000.0 * statistics.median(later) if later else None,
            machine=None if machine is None else machine.name,
        )

    def parts(self) -> Iterator[tuple[str, str]]:
        """Yields the name and the text of each figure that was both predicted and measured."""
        if self.peak_bytes_predicted is not None and self.peak_bytes_measured is not None:
            peak = PeakMemory(
                predicted=self.peak_bytes_predicted, measured=self.peak_bytes_measured
            )
            yield "peak", str(peak)
        if self.step_ms_predicted is not None and self.step_ms_measured:
            share = self.step_ms_predicted / self.step_ms_measured
            yield (
                "step time",
                f"{self.step_ms_measured:.1f} ms measured, {self.step_ms_predicted:.1f} ms "
                f"predicted for {self.machine} ({share:.1%} of it)",
            )

    def write(self, metrics_path: str) -> None:
        """Writes the figures beside the metrics. Raises OSError if that fails."""
        with (
            written_beside(f"{metrics_path}.summary.json") as temporary,
            open(temporary, "w", encoding="utf-8") as file,
        ):
            json.dump(asdict(self), file, indent=2)
            file.write("\n")


class RunTotals:
    """Adds up the iterations of one start, and notes its evaluations.

    program: the name of the program that the user started.
    """

    def __init__(self, facts: RunFacts, program: str) -> None:
        self._facts, self._program, self._began = facts, program, time.monotonic()
        self._iterations = self._samples = self._skipped = 0
        self._milliseconds = 0.0
        self._last: deque[IterationRecord] = deque(maxlen=LAST)
        self._best: tuple[int, Evaluation] | None = None

    def add(self, record: IterationRecord) -> None:
        """Adds an iteration."""
        self._iterations += 1
        self._samples += record.global_batch_size
        self._milliseconds += record.iteration_ms
        self._skipped += record.skipped
        self._last.append(record)

    def evaluated(self, iteration: int, result: Evaluation) -> None:
        """Notes a validation loss, if it is the best one so far."""
        better = self._best is None or result.loss < self._best[1].loss
        if math.isfinite(result.loss) and better:
            self._best = (iteration, result)

    def lines(
        self, config: RunConfig, progress: Progress, summary: RunSummary, *, finished: bool
    ) -> list[str]:
        """Returns the lines at the end of the run.

        progress: where the run is. summary: its predictions. finished: whether it is complete.
        """
        word = "finished" if finished else "stopped"
        heading = (
            f"{word} at iteration {progress.iteration} of {self._facts.num_iterations} after "
            f"{clock(time.monotonic() - self._began)}, with evaluations and saves"
        )
        details = [
            *(self._of_training(config, summary) if self._last else ()),
            *self._of_files(config, progress),
        ]
        return [heading, *(f"  {label:13}{text}" for label, text in details)]

    def _of_training(self, config: RunConfig, summary: RunSummary) -> Iterator[tuple[str, str]]:
        seconds, facts = self._milliseconds / 1000.0, self._facts
        tokens = self._samples * facts.tokens // facts.batch_size
        share = ""
        if facts.peak_flops is not None:
            flops = facts.flops * self._samples / facts.batch_size
            share = f", MFU {100.0 * flops / (facts.peak_flops * facts.world_size * seconds):.1f}%"
        yield (
            "trained",
            f"{self._samples:,} samples, {tokens:,} tokens in {clock(seconds)}: "
            f"{tokens / seconds:,.0f} tokens/s{share}",
        )
        count, last = len(self._last), self._last[-1]
        mean = "of the last iteration" if count == 1 else f"(mean of the last {count} iterations)"
        yield "loss", f"{Interval(self._last, facts).loss:.4f} {mean}"
        if self._best is not None:
            iteration, result = self._best
            yield (
                "validation",
                f"best loss {result.loss:.4f} (perplexity {result.perplexity:.3f}) at iteration "
                f"{iteration}",
            )
        if last.activation_bytes_measured is not None:
            predicted, measured = last.activation_bytes_predicted, last.activation_bytes_measured
            told = "as predicted to the byte"
            if predicted != measured:
                told = f"{size(predicted or 0)} were predicted"
            yield "kept", f"{size(measured)} for backward by a micro-batch, {told}"
        parts = dict(summary.parts())
        if "peak" not in parts and not config.training.torch_compile:
            by_flag = "" if config.logging.log_peak_memory else " (--log-peak-memory measures it)"
            parts = {"peak": f"not measured{by_flag}", **parts}
        yield from parts.items()

    def _of_files(self, config: RunConfig, progress: Progress) -> Iterator[tuple[str, str]]:
        if self._iterations:
            listed = skipped_batches_path(config) if self._skipped else None
            yield (
                "skipped",
                (plural(self._skipped, "update") if self._skipped else "no updates")
                + ("" if listed is None else f", listed in {listed}"),
            )
        save, metrics = config.checkpoint.save, config.logging.metrics_jsonl
        if save is not None and progress.iteration:
            yield "checkpoint", str(step_directory(Path(save), progress.iteration))
        log = log_file_path(config)
        if log is not None:
            yield "log", log
        if metrics is not None:
            paths = [metrics, *filter(None, [log])]
            yield "report", shlex.join([*subcommand(self._program, "report"), *paths])
