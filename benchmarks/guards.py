"""Times each guard of a run: a step of two data-parallel ranks with it, beside one without guards.

A guard that works at an interval has an interval of 1 here, so it runs in every step. The ranks are
processes on this machine's CPU, which the program starts itself. They communicate through gloo.
benchmarks/README.md explains how to read the table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import SEED, Setting
from benchmarks.harness import (
    Progress,
    benchmark_parser,
    heading,
    new_report,
    parse_benchmark,
    spread,
    write_report,
)
from benchmarks.layouts import Engine, Layout, build_engine, time_in_rounds
from benchmarks.rank_processes import joined, other_ranks
from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.optim.spike import SpikeGuard
from megatron_lite.parallel.state import ParallelState, parallel_state
from megatron_lite.supervision.drift import ReplicaCheck
from megatron_lite.supervision.slow_rank import SlowRanks

NONE = "no guard"
RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one guard.

    time_ratio: the time of a step with it over that of a step without guards, as (median, least,
        most) of the rounds.
    """

    dtype: str
    dropout: float
    guard: str
    ms: float
    time_ratio: tuple[float, float, float]
    samples_ms: list[float]


def engines(
    setting: Setting, args: argparse.Namespace, parallel: ParallelState
) -> dict[str, Engine]:
    """Returns an engine for each guard, by name. Each has its own model."""
    layout, batch = Layout(), setting.batch()

    def plain(name: str) -> Engine:
        return build_engine(name, layout, setting, batch, args.micro_batches, parallel)

    found = {
        name: plain(name) for name in (NONE, "NaN of a rank", "spike", "slow rank", "weight hash")
    }
    found["NaN of a rank"].optimizer.measure_own_grad_norm()
    found["spike"].optimizer.spikes = SpikeGuard(3.0, parallel.device)
    slow_ranks = SlowRanks(LoggingConfig(log_straggler=True, straggler_ratio=100.0), parallel)
    hashed = found["weight hash"]
    check = ReplicaCheck(hashed.model, hashed.optimizer, parallel)

    def timed_step(step: Callable[[], torch.Tensor]) -> torch.Tensor:
        with slow_ranks.listening(), slow_ranks.step(logged=True):
            loss = step()
        slow_ranks.lines()
        return loss

    def hashed_step(step: Callable[[], torch.Tensor]) -> torch.Tensor:
        loss = step()
        assert check.fault() is None
        return loss

    timed = found["slow rank"]
    return found | {
        "slow rank": replace(timed, step=lambda step=timed.step: timed_step(step)),
        "weight hash": replace(hashed, step=lambda step=hashed.step: hashed_step(step)),
    }


def measure(setting: Setting, args: argparse.Namespace, progress: Progress) -> list[Row]:
    """Measures all guards of one setting. Both ranks run this at the same time."""
    with parallel_state(Layout().parallel, seed=SEED) as parallel:
        by_name = engines(setting, args, parallel)
        for engine in by_name.values():
            engine.step()
        samples = time_in_rounds(
            list(by_name), by_name, args, f"{setting.dtype}, dropout {setting.dropout}", progress
        )
    return [
        Row(
            dtype=setting.dtype,
            dropout=setting.dropout,
            guard=name,
            ms=statistics.median(times),
            samples_ms=times,
            time_ratio=spread(times, samples[NONE]),
        )
        for name, times in samples.items()
    ]


def run_rank(args: argparse.Namespace, rank: int, folder: str) -> Iterator[list[Row]]:
    """Yields the rows of each setting in turn, as one of the two ranks."""
    torch.set_num_threads(args.threads or 1)
    with joined(rank, RANKS, folder):
        for dtype in args.dtype:
            for dropout in args.dropout:
                yield measure(
                    Setting(shape=args.shape, device=args.device, dtype=dtype, dropout=dropout),
                    args,
                    Progress(quiet=rank > 0),
                )


def other_rank(args: argparse.Namespace, rank: int, folder: str) -> None:
    """Runs rank 1, in the process that `main` starts."""
    for _ in run_rank(args, rank, folder):
        pass


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("guards.py", (__doc__ or "").partition("\n")[0], repeats=9)
    parser.set_defaults(dropout=[0.0], dtype=["float32"])
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=4,
        metavar="N",
        help="of a step, over both ranks; default: 4",
    )
    args = parse_benchmark(parser, argv)
    if args.device.type != "cpu":
        parser.error(f"the ranks are processes on the CPU: give --device cpu (got {args.device})")
    if args.micro_batches < RANKS or args.micro_batches % RANKS:
        parser.error(
            f"--micro-batches {args.micro_batches} must be a multiple of the {RANKS} ranks "
            "that share them"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0."""
    args = parse(argv)
    report: dict[str, Any] = {**new_report(args), "micro_batches": args.micro_batches}
    print(
        heading(report),
        f"{RANKS} data-parallel ranks, {args.micro_batches} micro-batches of the batch above "
        "in a step",
        sep="\n",
        flush=True,
    )
    with other_ranks(partial(other_rank, args), RANKS) as folder:
        for rows in run_rank(args, 0, folder):
            print(
                f"\n{rows[0].dtype}, dropout {rows[0].dropout}: a step without guards "
                f"takes {rows[0].ms:.1f} ms",
                f"{'guard':20}time / none",
                sep="\n",
            )
            for row in rows:
                print(
                    f"{row.guard:20}" + "{:.3f} ({:.3f}-{:.3f})".format(*row.time_ratio), flush=True
                )
            report["rows"] += [asdict(row) for row in rows]
            write_report(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
