"""Measures memory and time of recomputation: our policies, and torch's and transformers' engines.

The engines are those of benchmarks/recompute_engines.py. The table has for each the kept bytes
after forward, the most bytes alive in forward and backward, the FLOPs, and the step's time. The
time comes from rounds in which every engine has its turn. At --tp 2 the program starts its other
rank itself. benchmarks/README.md explains how to read the table.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import SEED, Setting
from benchmarks.harness import (
    Clock,
    Progress,
    benchmark_parser,
    clock_of,
    garbage_kept,
    heading,
    new_report,
    parse_benchmark,
    profile,
    spread,
    write_report,
)
from benchmarks.rank_processes import joined, other_ranks
from benchmarks.recompute_engines import NONE, Engine, Place, build_contestants, engine_names
from benchmarks.recompute_rows import HEADER, Row, table
from megatron_lite.config.model import ATTENTION_BACKENDS
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.parallel.rng import RngSnapshot, RngStreams
from megatron_lite.parallel.state import ParallelState, parallel_state

aten = torch.ops.aten
# torch counts the FLOPs of CUDA's flash kernels, but has no formula for the flash kernel of a CPU.
CPU_FLASH = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(
        *shapes[:3]
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: (
        sdpa_backward_flop_count(*shapes[:4])
    ),
}


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The figures of one forward and backward on this rank.

    Every engine starts from the same random state.
    kept_bytes: the bytes alive after forward.
    peak_bytes: the most bytes alive in forward and backward.
    grad_norm: the norm over this rank's shards.
    """

    kept_bytes: int
    peak_bytes: int
    flops: int
    loss: float
    grad_norm: float


def footprint(engine: Engine, streams: RngStreams, start: RngSnapshot) -> Footprint:
    """Measures an engine.

    The bytes include neither parameters nor the gradients to which backward adds. They include each
    new gradient until it is added.
    """
    with torch.autograd.set_multithreading_enabled(False):  # a dispatch mode belongs to its thread
        streams.restore(start)
        with FlopCounterMode(display=False, custom_mapping=CPU_FLASH) as counter:
            engine.step()
        grads = [
            parameter.grad.zero_() for parameter in engine.parameters if parameter.grad is not None
        ]
        streams.restore(start)
        gc.collect()
        with LiveStorages() as live:
            loss = engine.forward()
            kept_bytes = live.total_bytes()
            loss.backward()
    return Footprint(
        kept_bytes=kept_bytes,
        peak_bytes=live.peak_bytes,
        flops=counter.get_total_flops(),
        loss=loss.item(),
        grad_norm=torch.stack([grad.double().norm() for grad in grads]).norm().item(),
    )


def time_in_rounds(
    engines: Sequence[Engine],
    clock: Clock,
    place: Place,
    *,
    rounds: int,
    title: str,
    progress: Progress,
) -> dict[str, list[float]]:
    """Returns the milliseconds of every engine in every round, on the slowest rank.

    Each round begins with another engine.
    """
    samples: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for number in range(-1, rounds):  # the first round warms up
        for place_in_round in range(len(engines)):
            engine = engines[(place_in_round + number) % len(engines)]
            progress(f"{title}: round {number + 1} of {rounds}, {engine.name}")
            gc.collect()
            if place.parallel.tp_group is not None:
                dist.barrier(place.parallel.tp_group)
            milliseconds = clock.ms(engine.step)
            if number >= 0:
                samples[engine.name].append(milliseconds)
    if place.parallel.tp_group is None:
        return samples
    of_ranks: list[Any] = [None] * place.parallel.tp_size
    dist.all_gather_object(of_ranks, samples, place.parallel.tp_group)
    return {
        name: [max(times) for times in zip(*(rank[name] for rank in of_ranks), strict=True)]
        for name in samples
    }


@dataclass(frozen=True, kw_only=True)
class Block:
    """The rows of one setting. skipped: the engines that are left out, with the reasons."""

    title: str
    rows: list[Row]
    skipped: dict[str, str]
    profile: str


def rows_of(
    setting: Setting,
    place: Place,
    engines: Sequence[Engine],
    footprints: dict[str, Footprint],
    samples: dict[str, list[float]],
) -> Iterator[Row]:
    for engine in engines:
        measured, times = footprints[engine.name], samples[engine.name]
        base = footprints[
            f"transformers, {NONE}" if engine.name.startswith("transformers") else NONE
        ]
        rival = engine.rival if engine.rival in samples else None
        yield Row(
            tp_size=place.parallel.tp_size,
            sequence_parallel=place.sequence_parallel,
            dtype=setting.dtype,
            dropout=setting.dropout,
            engine=engine.name,
            kept_ratio=measured.kept_bytes / base.kept_bytes,
            extra_flops=measured.flops / base.flops - 1.0,
            ms=statistics.median(times),
            samples_ms=times,
            time_ratio=spread(times, samples[NONE]),
            rival=rival,
            rival_time_ratio=None if rival is None else spread(times, samples[rival]),
            **asdict(measured),
        )


def measure(setting: Setting, place: Place, args: argparse.Namespace, progress: Progress) -> Block:
    """Measures all engines of one setting."""
    parallel = place.parallel
    title = (
        f"TP {parallel.tp_size}{', sequence parallel' if place.sequence_parallel else ''}, "
        f"{setting.dtype}, dropout {setting.dropout}"
    )
    contestants = build_contestants(setting, place)
    engines = [
        engine
        for engine in contestants.engines
        if not args.engines or engine.name in args.engines or engine.name.endswith(NONE)
    ]
    start, footprints = parallel.rng.snapshot(), {}
    with garbage_kept():
        for engine in engines:
            progress(f"{title}: bytes and FLOPs of {engine.name}")
            footprints[engine.name] = footprint(engine, parallel.rng, start)
        samples = time_in_rounds(
            engines, clock_of(args), place, rounds=args.repeats, title=title, progress=progress
        )
    profiles = (
        profile(title, {engine.name: engine.step for engine in engines}, setting.device)
        if args.profile
        else ""
    )
    rows = list(rows_of(setting, place, engines, footprints, samples))
    return Block(title=title, rows=rows, skipped=contestants.skipped, profile=profiles)


def blocks(
    args: argparse.Namespace, parallel: ParallelState, progress: Progress
) -> Iterator[Block]:
    """Yields every setting at one tensor-parallel size. All ranks run this at the same time."""
    torch.set_num_threads(args.threads or max(1, args.cpu_threads // parallel.tp_size))
    for sequence_parallel, dtype, dropout in itertools.product(
        [False, True][: parallel.tp_size], args.dtype, args.dropout
    ):
        setting = Setting(
            shape=args.shape,
            device=args.device,
            dtype=dtype,
            dropout=dropout,
            attention_backend=args.attention_backend,
        )
        yield measure(
            setting, Place(parallel=parallel, sequence_parallel=sequence_parallel), args, progress
        )


@contextmanager
def rank_of(tp_size: int, rank: int, folder: str) -> Iterator[ParallelState]:
    """Yields the state of this process as one of `tp_size` ranks.

    The ranks meet through a file and communicate through gloo.
    """
    config = ParallelConfig(tensor_model_parallel_size=tp_size, distributed_backend="gloo")
    with joined(rank, tp_size, folder, minutes=5.0), parallel_state(config, seed=SEED) as parallel:
        yield parallel


def other_rank(args: argparse.Namespace, tp_size: int, rank: int, folder: str) -> None:
    """Runs another rank, in a process that `all_ranks` starts."""
    with rank_of(tp_size, rank, folder) as parallel:
        for _ in blocks(args, parallel, Progress(quiet=True)):
            pass


@contextmanager
def all_ranks(args: argparse.Namespace, tp_size: int) -> Iterator[ParallelState]:
    """Yields the state of this process as rank 0.

    The other ranks run `blocks` in their own processes, and none outlives the `with` block.
    """
    if tp_size == 1:
        yield ParallelState(device=args.device, rng=RngStreams(args.device, seed=SEED))
        return
    with (
        other_ranks(partial(other_rank, args, tp_size), tp_size) as folder,
        rank_of(tp_size, 0, folder) as parallel,
    ):
        yield parallel


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("recompute.py", (__doc__ or "").partition("\n")[0], repeats=9)
    parser.add_argument(
        "--tp",
        nargs="+",
        type=int,
        metavar="T",
        help="tensor-parallel sizes; above 1 on the CPU only; default: 1 2, on CUDA 1",
    )
    parser.add_argument(
        "--attention-backend",
        choices=ATTENTION_BACKENDS,
        default="auto",
        help="of megatron_lite; default: auto, which is unfused on a CPU with dropout, else flash",
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        default=[],
        metavar="NAME",
        help='only these rows of the table and those without recomputation, such as "uniform 1"',
    )
    args = parse_benchmark(parser, argv)
    args.tp = args.tp or ([1, 2] if args.device.type == "cpu" else [1])
    args.cpu_threads = torch.get_num_threads()
    unknown = sorted(set(args.engines) - engine_names(args.shape.num_layers))
    if unknown:
        parser.error(
            f"--engines {unknown[0]!r} must be one of "
            f"{', '.join(sorted(engine_names(args.shape.num_layers)))}"
        )
    for tp_size in args.tp:
        if tp_size > 1 and args.device.type != "cpu":
            parser.error(
                f"--tp {tp_size} runs its ranks on the CPU: it needs --device cpu (got "
                f"{args.device})"
            )
        for field in ("num_attention_heads", "seq_length", "vocab_size"):
            if tp_size < 1 or getattr(args.shape, field) % tp_size:
                parser.error(
                    f"--tp {tp_size} must be at least 1 and divide --{field.replace('_', '-')} "
                    f"{getattr(args.shape, field)}"
                )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0."""
    args = parse(argv)
    report: dict[str, Any] = {
        **new_report(args),
        "attention_backend": args.attention_backend,
        "skipped": {},
    }
    print(heading(report), flush=True)
    progress = Progress()
    for tp_size in args.tp:
        with all_ranks(args, tp_size) as parallel:
            for block in blocks(args, parallel, progress):
                print(
                    f"\n{block.title}: none takes {block.rows[0].ms:.1f} ms",
                    HEADER,
                    *table(block.rows),
                    sep="\n",
                    flush=True,
                )
                for name, reason in block.skipped.items():
                    print(f"{name}: skipped: {reason}", file=sys.stderr, flush=True)
                print(block.profile, end="", flush=True)
                report["rows"] += [asdict(row) for row in block.rows]
                report["skipped"].update(block.skipped)
                write_report(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
