"""Times a training step in every layout over ranks, beside one process at the same global batch.

The table has three figures for each layout. The step's time comes from rounds in which every layout
has its turn. The bytes that a rank receives in a step are counted and also predicted. The third
figure is the bytes of weights, gradients and optimizer states that a rank keeps between steps.
The ranks are processes on this machine's CPU, which the program starts itself. They communicate
through gloo. benchmarks/README.md explains how to read the table.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import DTYPES, Setting
from benchmarks.harness import (
    Progress,
    benchmark_parser,
    heading,
    new_report,
    parse_benchmark,
    spread,
    write_report,
)
from benchmarks.layouts import ALONE, Engine, Kept, build_engine, layouts, state_of, time_in_rounds
from benchmarks.rank_processes import joined, other_ranks
from benchmarks.traffic import Traffic, foretold

MIB = 2.0**20


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one layout. Bytes are those of rank 0.

    time_ratio: its time over that of one process, as (median, least, most) of the rounds.
    received_bytes, foretold_bytes: the received bytes of a step by kind of collective, counted and
        predicted. No prediction exists (None) for layouts that are not data-parallel.
    messages: the number of collectives of a step.
    """

    dtype: str
    dropout: float
    layout: str
    ranks: int
    ms: float
    time_ratio: tuple[float, float, float]
    received_bytes: dict[str, int]
    foretold_bytes: dict[str, int] | None
    messages: int
    kept: Kept
    loss: float
    samples_ms: list[float]


def measure(setting: Setting, args: argparse.Namespace, progress: Progress) -> list[Row]:
    """Measures all layouts of one setting. Returns the rows on rank 0, and [] on other ranks.

    All ranks run this at the same time. A rank that has no part in a layout waits.
    """
    title, rank = f"{setting.dtype}, dropout {setting.dropout}", dist.get_rank()
    engines: list[Engine] = []
    for name, layout in layouts(args.ddp_bucket_size, setting.shape.num_layers).items():
        if layout.parallel.context_parallel_size > 1 and setting.dropout > 0.0:
            progress(f"{name} left out: its flash attention has no dropout")
            continue
        # Creating groups is collective, so every rank enters every layout, also without an engine
        # in it. The groups stay alive after the block.
        with state_of(layout) as parallel:
            if rank < layout.ranks and (not args.layouts or name in (ALONE, *args.layouts)):
                engines.append(
                    build_engine(
                        name, layout, setting, setting.batch(), args.micro_batches, parallel
                    )
                )
    names = [engine.name for engine in engines] if rank == 0 else []
    agreed: list[Any] = [names]
    dist.broadcast_object_list(agreed)
    by_name = {engine.name: engine for engine in engines}
    found = {name: _counted(by_name.get(name)) for name in agreed[0]}
    samples = time_in_rounds(agreed[0], by_name, args, title, progress)
    if rank:
        return []
    return [
        Row(
            dtype=setting.dtype,
            dropout=setting.dropout,
            layout=name,
            ranks=by_name[name].layout.ranks,
            ms=statistics.median(times),
            samples_ms=times,
            kept=by_name[name].kept(),
            **found[name],
            time_ratio=spread(times, samples[ALONE]),
            foretold_bytes=_foretold(by_name[name], setting, args.micro_batches),
        )
        for name, times in samples.items()
    ]


def _counted(engine: Engine | None) -> dict[str, Any]:
    """Returns the counted bytes, messages and the loss of the engine's second step.

    The first step is not typical: it gathers FSDP2 units once more, to inspect them.
    """
    if engine is None:
        return {}
    engine.step()
    with torch.autograd.set_multithreading_enabled(False), Traffic() as traffic:
        loss = engine.step().item()
    return dict(
        received_bytes=dict(traffic.bytes), messages=sum(traffic.messages.values()), loss=loss
    )


def _foretold(engine: Engine, setting: Setting, micro_batches: int) -> dict[str, int] | None:
    """Returns the predicted bytes by kind, or None for a layout that no formula covers."""
    ranks = engine.layout.ranks
    if ranks == 1:
        return {}
    if engine.layout.parallel.data_parallel_size(ranks) == 1:
        return None
    width = DTYPES[setting.dtype].itemsize
    return dict(
        foretold(
            engine.layout.data_parallel,
            engine.shapes,
            ranks=ranks,
            micro_batches=micro_batches // ranks,
            element_bytes=width,
        )
    )


def run_rank(args: argparse.Namespace, rank: int, folder: str) -> Iterator[list[Row]]:
    """Yields the rows of each setting in turn, as one of the ranks."""
    torch.set_num_threads(args.threads or max(1, args.cpu_threads // args.ranks))
    with joined(rank, args.ranks, folder):
        for dtype in args.dtype:
            for dropout in args.dropout:
                setting = Setting(
                    shape=args.shape, device=args.device, dtype=dtype, dropout=dropout
                )
                yield measure(setting, args, Progress(quiet=rank > 0))


def other_rank(args: argparse.Namespace, rank: int, folder: str) -> None:
    """Runs another rank, in a process that `main` starts."""
    for _ in run_rank(args, rank, folder):
        pass


HEADER = (
    f"{'':38}{'time / one':17}{'received':>10} {'in':>4}{'weights':>9}{'grads':>8}{'states':>8}\n"
    f"{'layout':38}{'process':17}{'MiB':>10} {'':>4}{'MiB':>9}{'MiB':>8}{'MiB':>8}"
)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of one setting."""
    for row in rows:
        ratio = "{:.2f} ({:.2f}-{:.2f})".format(*row.time_ratio)
        kept = "".join(
            f"{size / MIB:{width}.1f}" for size, width in zip(row.kept, (9, 8, 8), strict=True)
        )
        yield (
            f"{row.layout:38}{ratio:17}{sum(row.received_bytes.values()) / MIB:10.2f} "
            f"{row.messages:4}{kept}"
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("parallel.py", (__doc__ or "").partition("\n")[0], repeats=9)
    parser.set_defaults(dropout=[0.0])
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=4,
        metavar="N",
        help="of a step, over all ranks; default: 4",
    )
    parser.add_argument(
        "--ddp-bucket-size",
        type=int,
        metavar="N",
        help="parameters of a bucket where reductions overlap; default: a quarter of the model's",
    )
    parser.add_argument(
        "--layouts", nargs="+", default=[], metavar="NAME", help='only these rows and "one process"'
    )
    args = parse_benchmark(parser, argv)
    args.ranks = max(layout.ranks for layout in layouts(1).values())
    args.cpu_threads = torch.get_num_threads()
    if args.device.type != "cpu":
        parser.error(f"the ranks are processes on the CPU: give --device cpu (got {args.device})")
    if args.micro_batches < args.ranks or args.micro_batches % args.ranks:
        parser.error(
            f"--micro-batches {args.micro_batches} must be a multiple of the {args.ranks} "
            "ranks that share them"
        )
    if unknown := sorted(set(args.layouts) - layouts(1).keys()):
        parser.error(f"--layouts {unknown[0]!r} must be one of {', '.join(layouts(1))}")
    shape = args.shape
    total = (
        12 * shape.num_layers * shape.hidden_size**2
        + (shape.vocab_size + shape.seq_length) * shape.hidden_size
    )
    args.ddp_bucket_size = args.ddp_bucket_size or math.ceil(total / 4)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0, or 1 if the received bytes differ from the prediction."""
    args = parse(argv)
    report: dict[str, Any] = {
        **new_report(args),
        "micro_batches": args.micro_batches,
        "ddp_bucket_size": args.ddp_bucket_size,
    }
    print(
        heading(report),
        f"{args.micro_batches} micro-batches of the batch above in a step",
        sep="\n",
        flush=True,
    )
    status = 0
    with other_ranks(partial(other_rank, args), args.ranks) as folder:
        for rows in run_rank(args, 0, folder):
            alone = next(row for row in rows if row.layout == ALONE)
            print(
                f"\n{alone.dtype}, dropout {alone.dropout}: one process takes {alone.ms:.1f} ms",
                HEADER,
                *table(rows),
                sep="\n",
                flush=True,
            )
            for row in rows:
                if row.foretold_bytes is not None and row.received_bytes != row.foretold_bytes:
                    print(
                        f"{row.layout}: {row.foretold_bytes} bytes were foretold, "
                        f"{row.received_bytes} received",
                        file=sys.stderr,
                    )
                    status = 1
            report["rows"] += [asdict(row) | {"kept": row.kept._asdict()} for row in rows]
            write_report(report, args.json)
    return status


if __name__ == "__main__":
    sys.exit(main())
