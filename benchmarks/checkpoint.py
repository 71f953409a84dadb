"""Times saving and loading a checkpoint, beside the disk itself and other formats.

    disk               the same number of bytes as one file: written and synced; read
    megatron_lite      shards, checksums, manifest and pointer, each synced; checksums compared,
                       tensors read and copied
    safetensors        save_file and a sync; load_file
    torch              torch.save and a sync; torch.load(weights_only=True)
    torch DCP          torch.distributed.checkpoint with sync_files; load into the same tensors

In every round each is done once, in turn, and gives one ratio. Everything runs in one process. The
page cache is dropped before a read.
A second part times training steps: without saving, with one save after a quarter of them, and with
that save in the background.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import PRESETS, SEED, Shape
from benchmarks.harness import device_name, write_report
from megatron_lite.checkpointing.load import load_checkpoint
from megatron_lite.checkpointing.manifest import MANIFEST, row_of
from megatron_lite.checkpointing.saver import Saver, claim_directory
from megatron_lite.checkpointing.snapshot import take_snapshot
from megatron_lite.checkpointing.start import find_start
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.data_settings import DataConfig, TokenizerConfig
from megatron_lite.config.lr_schedule_settings import LrScheduleConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import TrainingConfig
from megatron_lite.data.durable_files import sync_file, sync_folder
from megatron_lite.parallel.state import ParallelState, parallel_state
from megatron_lite.training.batches import MicroBatches
from megatron_lite.training.build_trainer import build_trainer
from megatron_lite.training.loop import Trainer
from megatron_lite.training.micro_batches import StageRunner
from megatron_lite.training.step import train_step

DISK, OURS = "disk", "megatron_lite"
BUFFER_BYTES = 2**22


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table.

    seconds: the median of the rounds.
    ratio: (median, least, most) over the rounds. The base is the disk's own time for "save" and
        "load", a save of ours for "checksum / save", and one training step for "stall".
    """

    what: str
    engine: str
    seconds: float
    ratio: tuple[float, float, float]
    samples_s: list[float]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A model with its optimizer, after one step, and a folder for everything that is written."""

    folder: Path
    trainer: Trainer
    parallel: ParallelState

    @property
    def directory(self) -> Path:
        """The directory of --save."""
        return self.folder / "ours"

    def options(self, *, async_save: bool = False) -> CheckpointConfig:
        """Returns options that keep the last checkpoint only, so the disk does not fill up."""
        return CheckpointConfig(
            save=str(self.directory),
            load=str(self.directory),
            save_keep_last=1,
            async_save=async_save,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors of model and optimizer that a checkpoint holds."""
        states = {
            f"{name}/{key}": value
            for name, of in self.trainer.optimizer.states.items()
            for key, value in of.items()
        }
        return {
            **{name: value.detach() for name, value in self.trainer.model.named_parameters()},
            **states,
        }

    def step(self) -> None:
        """Runs one training step."""
        trainer = self.trainer
        batches = MicroBatches(
            dataset=trainer.datasets.train,
            consumed_samples=0,
            num_microbatches=1,
            parallel=self.parallel,
            micro_batch_size=trainer.config.training.micro_batch_size,
        )
        train_step(
            StageRunner.of(trainer.config, trainer.model, self.parallel),
            trainer.optimizer,
            batches,
            learning_rate=1e-4,
        )

    @contextmanager
    def saver(self, *, async_save: bool = False) -> Iterator[Callable[[int], Saver]]:
        """Yields a function that saves a checkpoint as a given iteration."""
        options, trainer = self.options(async_save=async_save), self.trainer
        with Saver(
            options, self.parallel, claim_directory(options, self.parallel), started_at=0
        ) as saver:

            def save(iteration: int) -> Saver:
                snapshot = take_snapshot(
                    trainer.config,
                    self.parallel,
                    trainer.model,
                    trainer.optimizer,
                    replace(trainer.progress, iteration=iteration),
                    data=trainer.datasets.identity,
                    copy=saver.copies,
                )
                saver.save(snapshot, lambda line: None)
                return saver

            yield save


@contextmanager
def bench(shape: Shape, folder: Path, dtype: str) -> Iterator[Bench]:
    """Yields a bench with a model of the shape."""
    config = RunConfig(
        model=ModelConfig(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            max_position_embeddings=shape.seq_length,
            num_attention_heads=shape.num_attention_heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        training=TrainingConfig(
            micro_batch_size=shape.batch_size,
            global_batch_size=shape.batch_size,
            train_iters=10**6,
            eval_iters=0,
            seed=SEED,
            bf16=dtype == "bf16",
        ),
        parallel=ParallelConfig(distributed_backend="gloo"),
        data=DataConfig(seq_length=shape.seq_length, mock_data=True),
        tokenizer=TokenizerConfig(vocab_size=shape.vocab_size - 1),
        lr_schedule=LrScheduleConfig(lr=1e-4),
    )
    with parallel_state(config.parallel, seed=SEED) as parallel:
        one = Bench(folder=folder, trainer=build_trainer(config, parallel), parallel=parallel)
        one.step()
        yield one


def timed(action: Callable[[], object]) -> float:
    """Returns the seconds that the action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def synced(path: Path) -> None:
    """Returns once a file and its name are on the disk."""
    with path.open("rb") as file:
        sync_file(file)
    sync_folder(str(path.parent))


def write_plainly(path: Path, data: memoryview) -> None:
    """Writes the bytes to one file and syncs it: the disk's own speed."""
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), BUFFER_BYTES):
            file.write(data[start : start + BUFFER_BYTES])
        sync_file(file)
    sync_folder(str(path.parent))


def read_plainly(path: Path) -> None:
    """Reads one file through a small buffer: the disk's own speed."""
    buffer = bytearray(BUFFER_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def forget_pages(folder: Path) -> None:
    """Drops the files below the folder from the page cache, so that a read goes to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def saves(
    one: Bench, save: Callable[[int], Saver], iterations: Iterator[int], data: memoryview
) -> dict[str, Callable[[], object]]:
    """Returns every way of saving by name, DISK first."""
    tensors, folder = one.tensors(), one.folder

    def by_torch() -> None:
        torch.save(tensors, folder / "torch" / "file.pt")
        synced(folder / "torch" / "file.pt")

    def by_safetensors() -> None:
        save_file(
            {name: value.contiguous() for name, value in tensors.items()},
            str(folder / "safetensors" / "file"),
        )
        synced(folder / "safetensors" / "file")

    def by_dcp() -> None:
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        with quiet():
            dcp.save(
                dict(tensors),
                storage_writer=dcp.FileSystemWriter(folder / "dcp", sync_files=True),
                no_dist=True,
            )

    return {
        DISK: lambda: write_plainly(folder / DISK / "file", data),
        OURS: lambda: save(next(iterations)),
        "safetensors": by_safetensors,
        "torch": by_torch,
        "torch DCP": by_dcp,
    }


def loads(one: Bench) -> dict[str, Callable[[], object]]:
    """Returns every way of loading by name, DISK first."""
    folder, targets = one.folder, {name: value.clone() for name, value in one.tensors().items()}

    def by_ours() -> None:
        config = replace(one.trainer.config, checkpoint=one.options())
        start = find_start(config.checkpoint, one.parallel)
        load_checkpoint(start, config, one.parallel, one.trainer.model, one.trainer.optimizer)

    def fill(found: Mapping[str, Tensor]) -> None:
        for name, value in found.items():
            targets[name].copy_(value)

    def by_dcp() -> None:
        with quiet():
            dcp.load(targets, storage_reader=dcp.FileSystemReader(folder / "dcp"), no_dist=True)

    return {
        DISK: lambda: read_plainly(folder / DISK / "file"),
        OURS: by_ours,
        "safetensors": lambda: fill(load_file(folder / "safetensors" / "file")),
        "torch": lambda: fill(torch.load(folder / "torch" / "file.pt", weights_only=True)),
        "torch DCP": by_dcp,
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Silences DCP, which warns that there is no process group."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def rows_of(what: str, samples: Mapping[str, list[float]], to: Sequence[float]) -> list[Row]:
    """Returns a row for each engine. to: the base of the ratio in each round, in seconds."""
    rows = []
    for name, times in samples.items():
        ratios = [time_ / base for time_, base in zip(times, to, strict=True)]
        rows.append(
            Row(
                what=what,
                engine=name,
                seconds=statistics.median(times),
                samples_s=times,
                ratio=(statistics.median(ratios), min(ratios), max(ratios)),
            )
        )
    return rows


def measure_files(one: Bench, repeats: int, data: memoryview) -> list[Row]:
    """Times saving, loading and checksums, in turn. The first round does not count."""
    for name in (DISK, "safetensors", "torch", "dcp"):
        (one.folder / name).mkdir(parents=True)
    samples: dict[str, dict[str, list[float]]] = {"save": {}, "load": {}, "checksum": {}}
    with one.saver() as save:
        saving = saves(one, save, iter(range(1, 10**6)), data)
        loading = loads(one)
        for number in range(repeats + 1):
            for what, actions in (("save", saving), ("load", loading)):
                for name, action in actions.items():
                    if what == "load":
                        forget_pages(one.folder)
                    seconds = timed(action)
                    if number:
                        samples[what].setdefault(name, []).append(seconds)
            step = next(one.directory.glob("iter_*"))
            files = [path for path in step.iterdir() if path.name != MANIFEST]
            seconds = timed(partial(list, map(row_of, files)))
            if number:
                samples["checksum"].setdefault("SHA-256, from memory", []).append(seconds)
    rows = [
        row
        for what in ("save", "load")
        for row in rows_of(what, samples[what], samples[what][DISK])
    ]
    return rows + rows_of("checksum / save", samples["checksum"], samples["save"][OURS])


def measure_stall(one: Bench, repeats: int, steps: int) -> list[Row]:
    """Returns the time that one save adds to `steps` steps until it is durable, in steps.

    The row "waits" is the time of the call to `save` alone, which the log reports.
    """
    shutil.rmtree(one.directory, ignore_errors=True)
    extra: dict[str, list[float]] = {
        "in the foreground": [],
        "in the background": [],
        "in the background, waits": [],
    }
    one_step: list[float] = []
    iterations = iter(range(1, 10**6))
    for number in range(repeats + 1):
        alone = timed(lambda: [one.step() for _ in range(steps)])
        found = {}
        for name, async_save in (("in the foreground", False), ("in the background", True)):
            waits = 0.0
            with one.saver(async_save=async_save) as save:
                start = time.perf_counter()
                for step in range(steps):
                    one.step()
                    if step == steps // 4:
                        before = time.perf_counter()
                        saver = save(next(iterations))
                        waits = time.perf_counter() - before
                found[f"{name}, waits"] = waits
                saver.wait(lambda line: None)  # until it is durable
                found[name] = time.perf_counter() - start
        if number:
            one_step.append(alone / steps)
            for name in extra:
                extra[name].append(found[name] if name.endswith("waits") else found[name] - alone)
    return rows_of("stall", extra, one_step)


def line(row: Row, size: int) -> str:
    """Returns one line of the table."""
    middle, low, high = row.ratio
    rate = f"{size / row.seconds / 2**30:9.2f}" if row.what in ("save", "load") else " " * 9
    return (
        f"{row.what:16}{row.engine:26}{row.seconds * 1000.0:10.1f}{rate}  {middle:.2f} "
        f"({low:.2f}-{high:.2f})"
    )


HEADER = f"{'':42}{'ms':>10}{'GiB/s':>9}  to the disk's own (save, load), to a save, to a step"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="checkpoint.py", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--preset", choices=list(PRESETS), default="medium", help="the shape; default: medium"
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bf16"], default="bf16", help="of the weights; default: bf16"
    )
    parser.add_argument(
        "--directory", help="a folder on the disk to be measured; default: a temporary one"
    )
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="rounds; default: 7")
    parser.add_argument(
        "--steps",
        type=int,
        default=12,
        metavar="N",
        help="training steps around a save; default: 12",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads; default: torch's choice"
    )
    parser.add_argument("--json", metavar="FILE", help="also write settings and every sample")
    args = parser.parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0."""
    args = parse(argv)
    shape = PRESETS[args.preset]
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(torch.device("cpu")),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rounds": args.repeats,
        "steps": args.steps,
        "dtype": args.dtype,
        "shape": asdict(shape),
        "rows": [],
    }
    with (
        tempfile.TemporaryDirectory(dir=args.directory) as folder,
        bench(shape, Path(folder), args.dtype) as one,
    ):
        size = sum(value.nbytes for value in one.tensors().values())
        report["bytes"] = size
        print(
            f"{report['device']}, {report['threads']} CPU thread(s), torch {torch.__version__}, "
            f"{size / 2**20:.1f} MiB of tensors, medians of {args.repeats} rounds (least-most)\n"
            f"{HEADER}",
            flush=True,
        )
        for rows in (
            measure_files(one, args.repeats, memoryview(os.urandom(size))),
            measure_stall(one, args.repeats, args.steps),
        ):
            print(*(line(row, size) for row in rows), sep="\n", flush=True)
            report["rows"] += map(asdict, rows)
            write_report(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
