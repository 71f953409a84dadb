"""The short iteration line of the terminal: a row of a table that fits its columns.

    iteration  samples  ms/step    tokens/s    loss   norm        lr   kept pred./measured
       10/100      160    325.4       6,295  4.9146  2.791  5.78e-04     14.332/14.332 MiB

The other columns are MFU, if the peak is known, and the time left. `samples` counts all samples so
far, and `tokens/s` the tokens of all ranks. `norm` is the gradient norm before clipping. A narrow
terminal gets fewer columns. Megatron's line (training/iteration_line.py) is in the log file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.config.plural import plural
from megatron_lite.memory.explain.units import MIB, ByteUnit
from megatron_lite.training.iteration_line import (
    RunFacts,
    eta,
    full_batch_ms,
    mean_loss,
    utilization,
)
from megatron_lite.training.metrics import IterationRecord
from megatron_lite.training.peak_memory import PeakMemory

MOST_COLUMNS = 120
HEADING_EVERY = 25
KEPT = "kept pred./measured"
PEAK = "peak pred./measured"
# The columns that a narrow terminal does without, in this order.
DISPENSABLE = ("samples", KEPT, PEAK, "lr", "norm", "MFU")


class _Column(NamedTuple):
    name: str
    width: int


class ShortLines:
    """Formats the rows of one run, and repeats the heading from time to time.

    columns: the columns of the terminal. shows_peak: whether the memory is the peak of a step,
        because the run measures it. Otherwise it is the kept bytes of one micro-batch.
    """

    def __init__(self, facts: RunFacts, *, columns: int, shows_peak: bool) -> None:
        self._facts = facts
        self._rows, memory = 0, PEAK if shows_peak else KEPT
        counts = 2 * len(str(facts.num_iterations)) + 1
        self._shown = _fitting(
            [
                _Column("iteration", max(9, counts)),
                _Column("samples", max(7, len(str(facts.num_samples)))),
                _Column("ms/step", 7),
                _Column("tokens/s", 10),
                *([] if facts.peak_flops is None else [_Column("MFU", 6)]),
                _Column("loss", 7),
                _Column("norm", 8),
                _Column("lr", 8),
                _Column(memory, 20),
                _Column("ETA", 8),
            ],
            min(columns, MOST_COLUMNS),
        )

    def lines(self, records: Sequence[IterationRecord], peak: PeakMemory | None) -> list[str]:
        """Returns the row of these iterations, and the lines that belong with it.

        The heading comes before the first row and before every 25th after it. A line after the row
        counts skipped updates, if there were any.
        peak: the peak of a step, if it has been measured.
        """
        values = self._values(list(records), peak)
        lines = [] if self._rows % HEADING_EVERY else [_joined(self._shown)]
        lines.append(_joined(self._shown, values))
        self._rows += 1
        skipped, nan = sum(one.skipped for one in records), sum(one.nan for one in records)
        if skipped or nan:
            iterations = "this iteration" if len(records) == 1 else f"these {len(records)}"
            losses = plural(nan, "loss", "losses")
            lines.append(
                f"  of {iterations}: {plural(skipped, 'skipped update')}, {losses} not finite"
            )
        return lines

    def _values(self, records: list[IterationRecord], peak: PeakMemory | None) -> dict[str, str]:
        facts, last = self._facts, records[-1]
        ms = sum(one.iteration_ms for one in records) / len(records)
        full_ms = full_batch_ms(records, facts)
        share = utilization(records, facts)
        return {
            "iteration": f"{last.iteration}/{facts.num_iterations}",
            "samples": str(last.consumed_samples),
            "ms/step": f"{ms:,.1f}" if ms < 1e4 else f"{ms:,.0f}",
            "tokens/s": f"{facts.tokens / (full_ms / 1000.0):,.0f}",
            "MFU": f"{share['MFU']:.1f}%" if share else "",
            "loss": f"{mean_loss(records):.4f}",
            "norm": _plain(last.grad_norm),
            "lr": f"{last.learning_rate:.2e}",
            PEAK: "-" if peak is None else _pair(peak.predicted, peak.measured),
            KEPT: _pair(last.activation_bytes_predicted, last.activation_bytes_measured),
            "ETA": eta(last, facts, full_ms),
        }


def _fitting(columns: list[_Column], most: int) -> list[_Column]:
    """Returns the columns that fit into `most`, and at least those that no line can do without."""
    for name in DISPENSABLE:
        if len(_joined(columns)) <= most:
            break
        columns = [column for column in columns if column.name != name]
    return columns


def _joined(columns: Sequence[_Column], values: dict[str, str] | None = None) -> str:
    return "  ".join(
        f"{column.name if values is None else values[column.name]:>{column.width}}"
        for column in columns
    )


def _plain(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1e4 or not math.isfinite(value) else f"{value:.2e}"


def _pair(predicted: int | None, measured: int | None) -> str:
    """Returns "14.332/14.332 MiB", or "-" if a figure is not known yet."""
    if predicted is None or measured is None:
        return "-"
    # GiB from 1000 MiB on, so that no pair below 1000 GiB is longer than 19 characters.
    unit = ByteUnit.of(max(predicted, measured), gib_from=1000 * MIB)
    return f"{unit.number(predicted)}/{unit.number(measured)} {unit.name}"
