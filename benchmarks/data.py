"""Times the way from text to samples, and compares it with megatron-core's on the same files.

    preprocess      JSON lines of token ids into a .bin and .idx pair, in one process
    open            an .idx: ours checks every number and hashes the file, megatron-core maps it
    sample index    the order of documents and samples of one epoch
    load            samples in random order, from pages that are in memory
    blend index     the order in which a blend reads its datasets

In each round every engine does each row once, in a process of its own, which also gives the most
memory that the row adds. Mapped pages of files do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.data_engines import OURS, Sizes, Task, tasks_of
from benchmarks.harness import heading, in_rounds, new_report, spread, write_report


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table.

    per_second: how many of `unit` the engine does in a second, from the median of the rounds.
    ratio: its time over ours, (median, least, most) over the rounds.
    peak_bytes: the most memory that it added, over the rounds.
    """

    what: str
    engine: str
    unit: str
    seconds: float
    per_second: float
    ratio: tuple[float, float, float]
    peak_bytes: int
    samples_s: list[float]


def measured(action: Callable[[], object], clock: Callable[[], float]) -> tuple[float, int]:
    """Runs the action in a fork. Returns its seconds and the most bytes of memory it added."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            with _AnonymousPeak() as peak:
                start = clock()
                kept = action()
                seconds = clock() - start
            os.write(writer, json.dumps([seconds, peak.added_bytes]).encode())
            del kept
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("a measured action failed")
    seconds, added = json.loads(text)
    return seconds, added


class _AnonymousPeak:
    """Samples this process's memory without the pages of files, every 5 ms."""

    def __enter__(self) -> _AnonymousPeak:
        self._start = self._most = _anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._most = max(self._most, _anonymous_bytes())
        self._done.set()
        self._thread.join()

    @property
    def added_bytes(self) -> int:
        return self._most - self._start

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self._most = max(self._most, _anonymous_bytes())


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def measure(task: Task, repeats: int, clock: Callable[[], float]) -> list[Row]:
    """Returns a row for each engine."""
    actions = {name: partial(measured, action, clock) for name, action in task.actions.items()}
    found = {name: list(zip(*of, strict=True)) for name, of in in_rounds(actions, repeats).items()}
    return [
        Row(
            what=task.what,
            engine=name,
            unit=task.unit,
            seconds=statistics.median(times),
            per_second=task.count / statistics.median(times),
            ratio=spread(times, found[OURS][0]),
            peak_bytes=max(peaks),
            samples_s=list(times),
        )
        for name, (times, peaks) in found.items()
    ]


def line(row: Row) -> str:
    """Returns one line of the table."""
    middle, low, high = row.ratio
    return (
        f"{row.what:14}{row.engine:15}{row.seconds:9.3f}{row.per_second:14,.0f} {row.unit:10}"
        f"{row.peak_bytes / 2**20:9.1f}  {middle:.2f} ({low:.2f}-{high:.2f})"
    )


HEADER = f"{'':29}{'s':>9}{'a second':>14}{'':11}{'MiB':>9}  time / ours"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="data.py", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    for name, default, text in (
        ("lines", 20_000, "documents to tokenize"),
        ("documents", 10_000_000, "documents of the dataset"),
        ("reads", 20_000, "samples to read"),
        ("blend", 20_000_000, "samples of the blend"),
        ("datasets", 10, "datasets of the blend"),
        ("seq_length", 2048, "tokens of a sample"),
        ("repeats", 5, "rounds"),
    ):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text}; default: {default}"
        )
    parser.add_argument("--only", metavar="TEXT", help="rows whose name contains it")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time"
    )
    parser.add_argument("--directory", help="a folder for the files; default: a temporary one")
    parser.add_argument("--json", metavar="FILE", help="also write settings and every sample")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0."""
    args = parse(argv)
    torch.set_num_threads(1)  # each row runs in a fork
    sizes = Sizes(**{name: getattr(args, name) for name in Sizes.__dataclass_fields__})
    report = new_report(args)
    print(heading(report), HEADER, sep="\n", flush=True)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        for task in tasks_of(Path(folder), sizes):
            if args.only and args.only not in task.what:
                continue
            rows = measure(task, args.repeats, clock)
            print(*map(line, rows), sep="\n", flush=True)
            report["rows"] += map(asdict, rows)
            write_report(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
