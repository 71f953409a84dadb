"""The summary of a run: what was predicted of its steps, and what was measured.

The log's last line has it as text, and a JSON file beside the metrics has it for other programs.
"""

from __future__ import annotations

import json
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

    def __str__(self) -> str:
        """Returns the line of the log, or "" if nothing was both predicted and measured."""
        parts = []
        if self.peak_bytes_predicted is not None and self.peak_bytes_measured is not None:
            peak = PeakMemory(
                predicted=self.peak_bytes_predicted, measured=self.peak_bytes_measured
            )
            parts.append(f"peak of a step {peak}")
        if self.step_ms_predicted is not None and self.step_ms_measured:
            parts.append(
                f"time of a step {self.step_ms_measured:.1f} ms measured, "
                f"{self.step_ms_predicted:.1f} ms predicted for {self.machine} "
                f"({self.step_ms_predicted / self.step_ms_measured:.1%} of it)"
            )
        return f"how right the predictions were: {'; '.join(parts)}" if parts else ""


def write_summary(summary: RunSummary, metrics_path: str) -> str:
    """Writes the figures as JSON to METRICS.summary.json, and returns that path.

    Raises OSError if the file cannot be written.
    """
    path = f"{metrics_path}.summary.json"
    with written_beside(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump(asdict(summary), file, indent=2)
        file.write("\n")
    return path
