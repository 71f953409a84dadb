"""What a log writes to: text, JSON lines, TensorBoard and Weights & Biases. None can end a run.

Each of them has a name for messages, `write` and `close`.

A write that fails raises, and RunLog makes one warning of it (log.py). A file then holds whole
records only. Scalars have Megatron's names. The packages for them are optional and loaded here,
when a run needs them. W&B writes an offline run, which `wandb sync` can upload later; the
environment variable WANDB_MODE changes that.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_lite.checkpointing.directory import check_no_checkpoint
from megatron_lite.checkpointing.step_files import Progress
from megatron_lite.config.checks import InputError, as_object, parse_json
from megatron_lite.config.invocation import module_of_extra
from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.data.durable_files import written_beside

from .iteration_line import Interval, IterationRecord, RunFacts, peak_gib

if TYPE_CHECKING:
    from .skipped import SkippedUpdate


@contextmanager
def _opening(path: Path, name: str) -> Iterator[None]:
    check_no_checkpoint(path, name)
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # a package may raise any
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{name}: cannot be written ({reason}): choose another place") from error


class AppendedFile:
    """A file to which whole records are appended without a buffer, each with an end of line.

    name: the file's name in messages.
    Raises InputError if the file cannot be opened, or if it is a checkpoint's.
    """

    def __init__(self, path: str, name: str) -> None:
        self.name = name
        with _opening(Path(path), name):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
            )

    def write(self, record: str | IterationRecord | SkippedUpdate) -> None:
        """Appends a text, or the known fields of a row as JSON; NaN and infinity are null.

        If it does not fit, its written part is cut off.
        """
        text = record
        if not isinstance(record, str):
            # Floats have all their digits.
            row = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in record._asdict().items()
                if value is not None
            }
            text = json.dumps(row)
        status = os.fstat(self._descriptor)
        try:
            rest = memoryview(f"{text}\n".encode(errors="replace"))
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            if stat.S_ISREG(status.st_mode):
                with suppress(OSError):
                    os.ftruncate(self._descriptor, status.st_size)
            raise

    def close(self) -> None:
        os.close(self._descriptor)


ROW = '{"iteration": '  # as every row begins


def metrics_file(path: str, iteration: int, flag: str = "--metrics-jsonl") -> AppendedFile:
    """Opens a file with one JSON object a line.

    Keeps the rows up to `iteration` and drops later rows, which the run will write again. A resumed
    run therefore leaves the same rows as an uninterrupted one. A last line that a kill cut short is
    dropped too. The file as it was then stays beside it as FILE.previous, and a process that is
    killed meanwhile leaves either the old or the new text whole. A run from scratch removes the
    summary of an earlier run (summary.py), since it may not write one of its own.
    flag: the option that named the file, for messages.
    """
    name, temporary = f"{flag} {path}", f"{path}.tmp"
    with _opening(Path(path), name):
        text = Path(path).read_text(errors="replace") if os.path.isfile(path) else ""
        lines = [(_iteration_of(line), line) for line in text.splitlines(keepends=True)]
        # A kill may have left nothing but a part of the first row.
        is_cut = len(lines) < 2 and ROW.startswith(text[: len(ROW)])
        if not is_cut and min(lines)[0] == math.inf:
            raise InputError(
                f"{path}: holds no metrics of a run, and would be emptied: choose another file"
            )
        if iteration == 0:
            Path(f"{path}.summary.json").unlink(missing_ok=True)  # of an earlier run
        kept = "".join(line for number, line in lines if number <= iteration)
        if kept != text:
            with written_beside(f"{path}.previous", name=temporary):
                shutil.copyfile(path, temporary)
            with written_beside(path, name=temporary):
                Path(temporary).write_text(kept)
    return AppendedFile(path, name)


def _iteration_of(line: str) -> float:
    """Returns the iteration of a row; infinity for any other line."""
    try:
        row = as_object(parse_json(line, strict=False), "a row")
    except ValueError:
        return math.inf
    number = row.get("iteration")
    return number if isinstance(number, int) and line.endswith("\n") else math.inf


# The scalars that TensorBoard also gets over the consumed samples, as in Megatron. So it does the
# losses, whose names begin with LOSS.
BY_SAMPLES = {
    *("learning-rate", "batch-size", "loss-scale", "world-size"),
    *("grad-norm", "num-zeros", "params-norm"),
}
LOSS = "lm loss"


class TensorBoard:
    """Writes scalars to the folder of --tensorboard-dir, and some to its folder by_samples.

    start: the progress at the start. Points that an earlier run wrote past it are void.
    Raises InputError if the package is not installed, or if it cannot write in its folder.
    """

    name = "--tensorboard-dir"

    def __init__(self, folder: str, start: Progress) -> None:
        flag = f"{self.name} {folder}"
        module_of_extra("tensorboard", "tensorboard", needed_by=flag)
        with _opening(Path(folder), flag):
            writer = import_module("torch.utils.tensorboard").SummaryWriter
            self._by_iteration = writer(folder, purge_step=start.iteration + 1)
            # A folder of its own: there the steps count samples, not iterations.
            self._by_samples = writer(
                os.path.join(folder, "by_samples"), purge_step=start.consumed_samples + 1
            )

    def write(self, iteration: int, consumed: int, scalars: Mapping[str, float]) -> None:
        """Writes the points of an iteration, some of them also over the samples so far."""
        for name, value in scalars.items():
            self._by_iteration.add_scalar(name, value, iteration)
            if name in BY_SAMPLES or name.startswith(LOSS):
                self._by_samples.add_scalar(f"{name} vs samples", value, consumed)
        # A run that is killed loses no point, and a fault shows here.
        self._by_iteration.flush()
        self._by_samples.flush()

    def close(self) -> None:
        self._by_iteration.close()
        self._by_samples.close()


class Wandb:
    """Writes scalars to a run of Weights & Biases.

    Raises InputError if the package is not installed, or if it cannot begin a run.
    """

    name = "--wandb-project"

    def __init__(self, config: RunConfig) -> None:
        logging = config.logging
        flag = f"{self.name} {logging.wandb_project}"
        wandb = module_of_extra("wandb", "wandb", needed_by=flag)
        folder = logging.wandb_save_dir or str(Path(config.checkpoint.save or ".") / "wandb")
        with _opening(Path(folder), flag):
            os.makedirs(folder, exist_ok=True)
            self._run: Any = wandb.init(
                project=logging.wandb_project,
                name=logging.wandb_exp_name,
                entity=logging.wandb_entity,
                dir=folder,
                config=asdict(config),
                mode=os.environ.get("WANDB_MODE", "offline"),
            )

    def write(self, iteration: int, consumed: int, scalars: Mapping[str, float]) -> None:
        """Writes the points of an iteration, and the samples so far."""
        self._run.log({**scalars, "samples vs steps": consumed}, step=iteration)

    def close(self) -> None:
        self._run.finish(quiet=True)


def scalars_of(one: Interval, facts: RunFacts, config: LoggingConfig) -> dict[str, float | None]:
    """Returns the scalars of one iteration by Megatron's names; None if one is not asked for.

    The throughput and the peak of the memory need no flag, unlike in Megatron.
    """
    record = one.last
    scalars = {
        "learning-rate": record.learning_rate,
        "decoupled-learning-rate": record.decoupled_learning_rate,
        "batch-size": record.global_batch_size,
        LOSS: record.lm_loss,
        "loss-scale": record.loss_scale if config.log_loss_scale_to_tensorboard else None,
        "world-size": facts.world_size if config.log_world_size_to_tensorboard else None,
        "grad-norm": record.grad_norm,
        "num-zeros": record.num_zeros,
        "params-norm": record.params_norm,
        "load_balancing_loss": record.load_balancing_loss,
        "z_loss": record.z_loss,
        "expert-imbalance": record.expert_imbalance,
        "expert-rank-imbalance": record.expert_rank_imbalance,
        "throughput": one.teraflops,
        "tokens-per-second": record.tokens_per_second,
        "iteration-time": record.iteration_ms / 1000.0
        if config.log_timers_to_tensorboard
        else None,
        "mem-peak-gib": peak_gib(facts.device),
        **one.utilization,
    }
    if config.log_memory_to_tensorboard and facts.device.type == "cuda":
        stats = torch.cuda.memory_stats(facts.device)
        scalars |= {
            "mem-reserved-bytes": stats["reserved_bytes.all.current"],
            "mem-allocated-bytes": stats["allocated_bytes.all.current"],
            "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
            "mem-allocated-count": stats["allocation.all.current"],
        }
    return scalars
