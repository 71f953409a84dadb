"""Times collectives through shared memory beside gloo's, and steps of the quickstart's model.

Two ranks are processes on this machine's CPU, which the program starts itself, each with one
thread. The first table has each collective at several sizes. The second one has a training step at
tensor-parallel size 2, through shared memory and through gloo, over that of one process with two
threads. All are timed in one run, in rounds in which each has its turn. benchmarks/README.md
explains how to read the tables.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import Setting, Shape
from benchmarks.harness import Progress, Spread, device_name, spread, write_report
from benchmarks.layouts import ALONE, Layout, build_engine, split, state_of
from benchmarks.rank_processes import joined, other_ranks
from megatron_lite.parallel.collectives import (
    all_gather_first_dim,
    all_reduce,
    reduce_scatter_first_dim,
)
from megatron_lite.parallel.shared_memory import CHANNELS
from megatron_lite.parallel.shared_memory_setup import shared_memory_of

RANKS = 2
QUICKSTART = Shape(
    num_layers=4,
    hidden_size=256,
    num_attention_heads=8,
    seq_length=128,
    batch_size=8,
    vocab_size=4096,
)
SHAPES = {
    "quickstart": QUICKSTART,
    "tiny": Shape(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        seq_length=8,
        batch_size=2,
        vocab_size=64,
    ),
}
LAYOUTS: dict[str, Layout] = {
    "TP 2": split(tensor_model_parallel_size=RANKS),
    "TP 2, sequence parallel": split(tensor_model_parallel_size=RANKS, sequence_parallel=True),
}
WAYS = ("shared memory", "gloo")


class Times(NamedTuple):
    """Milliseconds of a call on the slowest rank, and the processor time of all ranks together."""

    wall: float
    cpu: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One action in two ways.

    kib: the size of the whole tensor, or None for a training step.
    ms, cpu_ms: medians over the rounds.
    wall_ratio, cpu_ratio: the time over that of the same collective through gloo. For a step, over
        that of one process with two threads.
    """

    name: str
    way: str
    kib: int | None
    ms: float
    cpu_ms: float
    wall_ratio: Spread
    cpu_ratio: Spread


Actions = Mapping[tuple[str, str], Callable[[], object]]


def timed(actions: Actions, rounds: int, calls: int) -> dict[tuple[str, str], list[Times]]:
    """Returns the times of each action in every round. Each round begins with another action."""
    samples: dict[tuple[str, str], list[Times]] = {key: [] for key in actions}
    keys = list(actions)
    for number in range(-1, rounds):  # the first round warms up
        for place in range(len(keys)):
            key = keys[(place + number) % len(keys)]
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(calls):
                actions[key]()
            own = torch.tensor([time.perf_counter() - start, time.process_time() - cpu_start])
            of_ranks = [torch.empty_like(own) for _ in range(RANKS)]
            dist.all_gather(of_ranks, own)
            if number >= 0:
                whole = torch.stack(of_ranks) * 1000.0 / calls
                samples[key].append(Times(whole[:, 0].max().item(), whole[:, 1].sum().item()))
    return samples


@contextmanager
def way_of(way: str, group: ProcessGroup) -> Iterator[None]:
    """Sends through gloo inside the block if `way` says so."""
    channel = CHANNELS.pop(group) if way == "gloo" else None
    try:
        yield
    finally:
        if channel is not None:
            CHANNELS[group] = channel


def in_way(way: str, group: ProcessGroup, act: Callable[[], object]) -> Callable[[], object]:
    """Returns `act`, sent in this way."""

    def run() -> None:
        with way_of(way, group):
            act()

    return run


def rows_of(
    samples: Mapping[tuple[str, str], list[Times]],
    base: Callable[[tuple[str, str]], tuple[str, str]],
    kib: int | None,
) -> Iterator[Row]:
    for key, times in samples.items():
        others = samples[base(key)]
        yield Row(
            name=key[0],
            way=key[1],
            kib=kib,
            ms=statistics.median(one.wall for one in times),
            cpu_ms=statistics.median(one.cpu for one in times),
            wall_ratio=spread([one.wall for one in times], [one.wall for one in others]),
            cpu_ratio=spread([one.cpu for one in times], [one.cpu for one in others]),
        )


def collective_rows(group: ProcessGroup, args: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of every collective and size."""
    for kib in args.kib:
        whole = torch.ones(kib * 256)
        shard = torch.ones(kib * 256 // RANKS)
        acts: dict[str, Callable[[], object]] = {
            "all-reduce": partial(all_reduce, whole, group),
            "all-gather": partial(all_gather_first_dim, shard, group),
            "reduce-scatter": partial(reduce_scatter_first_dim, whole, group),
        }
        samples = timed(
            {(name, way): in_way(way, group, act) for name, act in acts.items() for way in WAYS},
            args.repeats,
            max(1, min(20, 2048 // kib)),
        )
        yield from rows_of(samples, lambda key: (key[0], "gloo"), kib)


def step_rows(rank: int, group: ProcessGroup, args: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of the training steps. The rank beside "one process" waits and sleeps."""
    setting = Setting(
        shape=SHAPES[args.shape], device=torch.device("cpu"), dtype="float32", dropout=0.0
    )
    actions: dict[tuple[str, str], Callable[[], object]] = {}
    alone = (ALONE, "2 threads")
    with state_of(Layout(ranks=1)) as parallel:
        one = build_engine(ALONE, Layout(ranks=1), setting, setting.batch(), 1, parallel)

    def step_alone() -> None:
        if rank == 0:
            torch.set_num_threads(2)
            one.step()
            torch.set_num_threads(1)

    actions[alone] = step_alone
    for name, layout in LAYOUTS.items():
        with state_of(layout) as parallel:
            assert parallel.tp_group is group, "the group of all ranks has the shared memory"
            engine = build_engine(name, layout, setting, setting.batch(), 1, parallel)
        for way in WAYS:
            actions[name, way] = in_way(way, group, engine.step)
    yield from rows_of(timed(actions, args.repeats, args.steps), lambda _: alone, None)


def run_rank(args: argparse.Namespace, rank: int, folder: str) -> list[Row]:
    """Returns all rows, as one of the ranks. They are the same on each."""
    torch.set_num_threads(1)
    progress = Progress(quiet=rank > 0)
    with joined(rank, RANKS, folder):
        group = dist.group.WORLD
        assert group is not None
        with shared_memory_of([group], timeout=600.0, say=lambda line: sys.exit(line)):
            rows = []
            for row in collective_rows(group, args):
                rows.append(row)
                progress(f"{row.name} of {row.kib} KiB")
            return rows + list(step_rows(rank, group, args))


def other_rank(args: argparse.Namespace, rank: int, folder: str) -> None:
    """Runs the other rank, in a process that `main` starts."""
    run_rank(args, rank, folder)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields both tables. A ratio is a median, with the least and the greatest of the rounds."""
    for over, part in (
        ("gloo", [row for row in rows if row.kib is not None]),
        ("one process", [row for row in rows if row.kib is None]),
    ):
        yield f"\n{'':26}{'':16}{'KiB':>7}{'ms':>10}  {f'time / {over}':20}processor time / {over}"
        for row in part:
            ratios = (
                "{:.2f} ({:.2f}-{:.2f})".format(*one) for one in (row.wall_ratio, row.cpu_ratio)
            )
            wall, cpu = ratios
            yield (f"{row.name:26}{row.way:16}{row.kib or '':>7}{row.ms:10.3f}  {wall:20}{cpu}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="collectives.py", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--kib",
        nargs="+",
        type=int,
        metavar="N",
        default=[4**power for power in range(2, 9)],
        help="sizes of the whole tensor in KiB; default: 16 to 65536",
    )
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="quickstart", help="default: quickstart"
    )
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="rounds; default: 9")
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="training steps of a turn; default: 3"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows")
    args = parser.parse_args(argv)
    if min(*args.kib, args.repeats, args.steps) < 1:
        parser.error("--kib, --repeats and --steps must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0."""
    args = parse(argv)
    with other_ranks(partial(other_rank, args), RANKS) as folder:
        rows = run_rank(args, 0, folder)
    cpu = torch.device("cpu")
    print(
        f"{device_name(cpu)}, torch {torch.__version__}, {args.repeats} rounds",
        *table(rows),
        sep="\n",
    )
    write_report(
        {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "device": device_name(cpu),
            "torch": torch.__version__,
            "rounds": args.repeats,
            "steps": args.steps,
            "shape": asdict(SHAPES[args.shape]),
            "rows": [asdict(row) for row in rows],
        },
        args.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
