"""What one iteration reports, and the JSON-lines file of it.

One object per iteration, floats with all their digits: equal text means equal numbers. A NaN or infinite value is null.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from megatron_lite.config.checks import InputError
from megatron_lite.training.skipped import SkippedUpdate


@dataclass(frozen=True, kw_only=True)
class IterationRecord:
    """lm_loss: mean over the global batch, nats per token. learning_rate, loss_scale: those used. skipped, nan: 0 or 1.

    tokens_per_second: over all ranks. activation_bytes_*: kept for backward by one micro-batch, the most of any rank; measured
    on the run's first micro-batch. activation_host_bytes_*: the same in host memory; None unless a policy moves tensors there.
    """

    iteration: int
    consumed_samples: int
    global_batch_size: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    iteration_ms: float
    tokens_per_second: float
    skipped: int
    nan: int
    activation_bytes_predicted: int | None = None
    activation_bytes_measured: int | None = None
    activation_host_bytes_predicted: int | None = None
    activation_host_bytes_measured: int | None = None


class MetricsFile:
    """Appends records to a file, one JSON object a line, each flushed.

    Opened at iteration n, it keeps the rows up to n and drops later ones, which the run is about to write again: a resumed run
    leaves the same rows as an uninterrupted one. Where rows are dropped, the file as it was stays beside it as FILE.previous
    (then FILE.previous2, and so on).
    """

    def __init__(self, path: str, *, after_iteration: int) -> None:
        target = Path(path)
        try:
            kept = _rows_up_to(target, after_iteration)
            target.parent.mkdir(parents=True, exist_ok=True)
            if kept is not None:
                os.replace(target, _unused_name(path))
                target.write_text("".join(kept))
            self._file: IO[str] = target.open("a")
        except OSError as error:
            raise InputError(f"--metrics-jsonl {path}: cannot be written ({error.strerror}): choose another file") from error

    def write(self, record: IterationRecord | SkippedUpdate) -> None:
        """Appends one row."""
        row = {key: None if isinstance(value, float) and not math.isfinite(value) else value
               for key, value in asdict(record).items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def _unused_name(path: str) -> str:
    """FILE.previous, or the first of FILE.previous2, FILE.previous3 .. that does not exist."""
    names = (f"{path}.previous{number or ''}" for number in (0, *range(2, 10**6)))
    return next(name for name in names if not os.path.exists(name))


def _rows_up_to(path: Path, iteration: int) -> list[str] | None:
    """The rows to keep, or None where the file may stay as it is. A last line cut short by a kill is dropped."""
    if not path.is_file():
        return None
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    numbered = [(line, _iteration_of(line)) for line in lines]
    kept = [line for line, number in numbered if number is not None and number <= iteration]
    return None if kept == lines else kept


def _iteration_of(line: str) -> int | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    number = value.get("iteration") if isinstance(value, dict) else None
    return number if isinstance(number, int) and line.endswith("\n") else None
