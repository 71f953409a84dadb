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
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.checkpoint_engines import DISK, Bench, bench, forget_pages, loads, saves
from benchmarks.engines import PRESETS
from benchmarks.harness import heading, in_rounds, new_report, spread, write_report


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table.

    seconds: the median of the rounds.
    ratio: (median, least, most) over the rounds. The base is the disk's own time for "save" and
        "load", and one training step for "stall".
    """

    what: str
    engine: str
    seconds: float
    ratio: tuple[float, float, float]
    samples_s: list[float]


def timed(action: Callable[[], object]) -> float:
    """Returns the seconds that the action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def rows_of(what: str, samples: Mapping[str, list[float]], to: Sequence[float]) -> list[Row]:
    """Returns a row for each engine. to: the base of the ratio in each round, in seconds."""
    return [
        Row(
            what=what,
            engine=name,
            seconds=statistics.median(times),
            samples_s=times,
            ratio=spread(times, to),
        )
        for name, times in samples.items()
    ]


def measure_files(one: Bench, repeats: int, data: memoryview) -> list[Row]:
    """Times saving and loading."""
    for name in (DISK, "safetensors", "torch", "dcp"):
        (one.folder / name).mkdir(parents=True)
    with one.saver() as save:
        saving = saves(one, save, iter(range(1, 10**6)), data)
        saved = in_rounds(
            {name: partial(timed, action) for name, action in saving.items()}, repeats
        )

    def cold(action: Callable[[], object]) -> float:
        forget_pages(one.folder)
        return timed(action)

    loaded = in_rounds(
        {name: partial(cold, action) for name, action in loads(one).items()}, repeats
    )
    return [*rows_of("save", saved, saved[DISK]), *rows_of("load", loaded, loaded[DISK])]


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


HEADER = f"{'':42}{'ms':>10}{'GiB/s':>9}  to the disk's own (save, load), to a step"


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
    args.shape = PRESETS[args.preset]
    report = new_report(args)
    with (
        tempfile.TemporaryDirectory(dir=args.directory) as folder,
        bench(args.shape, Path(folder), args.dtype) as one,
    ):
        size = sum(value.nbytes for value in one.tensors().values())
        report["bytes"] = size
        print(heading(report), f"{size / 2**20:.1f} MiB of tensors\n{HEADER}", sep="\n", flush=True)
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
