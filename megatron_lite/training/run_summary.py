"""The summary of a run: what was predicted of its steps, and what was measured.

The last lines of the log have it as text (run_totals.py). A JSON file beside the metrics has it for
other programs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from megatron_lite.data.durable_files import written_beside
from megatron_lite.training.peak_memory import PeakMemory


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The figures of a run. A figure that is not known is None.

    peak_bytes_*: the peak of a step on the rank that holds most.
    step_ms_*: the time of a step; the measured one is the median.
    machine: the name of the machine for which the time was predicted.
    """

    peak_bytes_predicted: int | None
    peak_bytes_measured: int | None
    step_ms_predicted: float | None
    step_ms_measured: float | None
    machine: str | None

    def parts(self) -> Iterator[tuple[str, str]]:
        """Yields the name and the text of each figure that was both predicted and measured."""
        if self.peak_bytes_predicted is not None and self.peak_bytes_measured is not None:
            peak = PeakMemory(
                predicted=self.peak_bytes_predicted, measured=self.peak_bytes_measured
            )
            yield "peak of a step", str(peak)
        if self.step_ms_predicted is not None and self.step_ms_measured:
            share = self.step_ms_predicted / self.step_ms_measured
            yield (
                "time of a step",
                f"{self.step_ms_measured:.1f} ms measured, {self.step_ms_predicted:.1f} ms "
                f"predicted for {self.machine} ({share:.1%} of it)",
            )


def write_summary(summary: RunSummary, metrics_path: str) -> str:
    """Writes the figures as JSON to METRICS.summary.json, and returns that path.

    Raises OSError if the file cannot be written.
    """
    path = f"{metrics_path}.summary.json"
    with written_beside(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump(asdict(summary), file, indent=2)
        file.write("\n")
    return path
