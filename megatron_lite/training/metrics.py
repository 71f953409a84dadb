"""The figures of one iteration, and the JSON-lines file that holds them.

The file has one object per iteration. Floats have all their digits, so equal text means equal
numbers. A NaN or infinite value is null.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_lite.checkpointing.directory import check_no_checkpoint
from megatron_lite.config.checks import InputError
from megatron_lite.data.durable_files import written_beside
from megatron_lite.training.appended import AppendedFile, opening
from megatron_lite.training.skipped import SkippedUpdate


@dataclass(frozen=True, kw_only=True)
class IterationRecord:
    """The figures of one iteration.

    lm_loss: the mean over the global batch, in nats per token.
    grad_norm: the global 2-norm before clipping.
    learning_rate, loss_scale: the ones that this iteration used.
    decoupled_learning_rate: that of the word embedding and the output layer. None without
        --decoupled-lr; a row then has no such field.
    tokens_per_second: the tokens of all ranks.
    skipped: 1 if no weight was changed, else 0.
    nan: 1 if the loss is NaN or infinite, else 0.
    activation_bytes_*: the kept bytes of one micro-batch in device memory, the most of any rank.
        They are measured on the run's first micro-batch.
    activation_host_bytes_*: those in host memory. None unless a policy moves tensors there.
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
    decoupled_learning_rate: float | None = None


class MetricsFile:
    """Appends records to a file, one JSON object a line, each written at once.

    Opening keeps the rows up to `after_iteration` and drops later rows, which the run will write
    again. A resumed run therefore leaves the same rows as an uninterrupted one. If rows are
    dropped, the old file stays beside the new one as FILE.previous, later ones as FILE.previous2
    and so on.
    flag: the option that named the file, for messages.
    keep_last: how many of the old files stay, the latest ones. None keeps all.
    Raises InputError if the file cannot be opened. A write that fails later does not end a run
    (AppendedFile).
    """

    def __init__(
        self,
        path: str,
        *,
        after_iteration: int,
        flag: str = "--metrics-jsonl",
        keep_last: int | None = None,
    ) -> None:
        target, name = Path(path), f"{flag} {path}"
        check_no_checkpoint(target, name)
        with opening(name):
            kept = _rows_up_to(target, after_iteration)
            if kept is not None:
                _replace(target, "".join(kept))
            if keep_last is not None and target.parent.is_dir():
                for _, old in _previous(target)[:-keep_last]:
                    old.unlink(missing_ok=True)
        self._file = AppendedFile(target, name=name)

    def write(self, record: IterationRecord | SkippedUpdate) -> str | None:
        """Appends one row. Returns a warning if the row is the first one that could not be
        written."""
        row = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(record).items()
            if value is not None or key != "decoupled_learning_rate"
        }
        return self._file.append(
            (json.dumps(row) + "\n").encode(), what=f"iteration {record.iteration}"
        )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _replace(path: Path, text: str) -> None:
    """Replaces the file's text atomically and keeps the old file beside it.

    A process that is killed meanwhile leaves either the old or the new text whole.
    """
    previous, temporary = _previous(path), path.with_name(path.name + ".tmp")
    # A start that was killed right after the link has kept the old file already.
    if not any(os.path.samefile(path, old) for _, old in previous):
        number = previous[-1][0] + 1 if previous else 1
        kept = path.with_name(f"{path.name}.previous{number if number > 1 else ''}")
        try:
            os.link(path, kept)
        except OSError:  # a file system without hard links
            with written_beside(str(kept), name=str(temporary)):
                shutil.copyfile(path, temporary)
    with written_beside(str(path), name=str(temporary)):
        temporary.write_text(text)


def _previous(path: Path) -> list[tuple[int, Path]]:
    """Returns the old files that were kept, with their numbers, oldest first."""
    names = (
        (re.fullmatch(re.escape(path.name) + r"\.previous(\d{0,9})", other.name), other)
        for other in path.parent.iterdir()
    )
    return sorted((int(name[1] or 1), other) for name, other in names if name is not None)


def _rows_up_to(path: Path, iteration: int) -> list[str] | None:
    """Returns the rows to keep, or None if the file can stay as it is.

    A last line that a kill cut short is dropped.
    """
    if not path.is_file():
        return None
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    numbered = [(line, _iteration_of(line)) for line in lines]
    if len(lines) > 1 and all(number is None for _, number in numbered):
        raise InputError(
            f"{path}: holds no metrics of a run, and would be emptied: choose another file"
        )
    kept = [line for line, number in numbered if number is not None and number <= iteration]
    return None if kept == lines else kept


def _iteration_of(line: str) -> int | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    number = value.get("iteration") if isinstance(value, dict) else None
    return number if isinstance(number, int) and line.endswith("\n") else None
