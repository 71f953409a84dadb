"""Measures memory and time of recomputation: our policies, and torch's and transformers' engines.

The engines are those of benchmarks/recompute_engines.py. The table has for each the kept bytes
after forward, the most bytes alive in forward and backward, the FLOPs, and the step's time. The
time comes from rounds in which every engine has its turn. benchmarks/README.md explains how to read
the table.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import SEED, Setting
from benchmarks.harness import (
    Progress,
    Spread,
    benchmark_parser,
    clock_of,
    garbage_kept,
    heading,
    in_rounds,
    new_report,
    parse_benchmark,
    spread,
    write_report,
)
from benchmarks.recompute_engines import NONE, Engine, build_contestants, engine_names
from megatron_lite.config.model import ATTENTION_BACKENDS
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.parallel.generators import RngSnapshot
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.state import ParallelState

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
class Row:
    """The result of one engine.

    kept_ratio, extra_flops: relative to the same model without recomputation. transformers' engines
        are compared with transformers' model.
    time_ratio: its time over that of our `none`, over the rounds.
    rival: the policy of ours that keeps the same tensors, if the engine is not ours.
    rival_time_ratio: its time over that of `rival`. Above 1 ours is faster.
    """

    dtype: str
    dropout: float
    engine: str
    kept_bytes: int
    kept_ratio: float
    peak_bytes: int
    flops: int
    extra_flops: float
    ms: float
    time_ratio: Spread
    rival: str | None
    rival_time_ratio: Spread | None
    loss: float
    grad_norm: float
    samples_ms: list[float]


HEADER = (
    f"{'':31}{'kept':>8} {'of':>5}{'peak':>9}  {'time / none':17}{'FLOPs':>7}   {'its time /':17}\n"
    f"{'engine':31}{'MiB':>8} {'none':>5}{'MiB':>9}  {'(min-max)':17}{'':>7}   {'that of ours':17}"
)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of one block."""
    for row in rows:
        yield (
            f"{row.engine:31}{row.kept_bytes / 2**20:8.2f} "
            f"{row.kept_ratio:5.0%}{row.peak_bytes / 2**20:9.2f}  "
            f"{shown(row.time_ratio):17}{row.extra_flops:+7.1%}   {shown(row.rival_time_ratio):17}"
        ).rstrip()


def shown(ratio: Spread | None) -> str:
    """Returns the ratio in at most 16 columns, up to 999.

    A machine that does other work as well can show ratios of 10 and more. They have one digit less.
    """
    if ratio is None:
        return ""
    middle, low, high = (f"{one:.2f}" if one < 9.995 else f"{one:.3g}" for one in ratio)
    return f"{middle} ({low}-{high})"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The figures of one forward and backward on this rank.

    Every engine starts from the same random state.
    kept_bytes: the bytes alive after forward.
    peak_bytes: the most bytes alive in forward and backward.
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


def rows_of(
    setting: Setting,
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


def measure(
    setting: Setting, parallel: ParallelState, args: argparse.Namespace
) -> tuple[list[Row], dict[str, str]]:
    """Measures all engines of one setting. Returns their rows, and who is left out and why."""
    contestants = build_contestants(setting, parallel)
    engines = [
        engine
        for engine in contestants.engines
        if not args.engines or engine.name in args.engines or engine.name.endswith(NONE)
    ]
    start, footprints, progress = parallel.rng.snapshot(), {}, Progress()
    with garbage_kept():
        for engine in engines:
            progress(f"bytes and FLOPs of {engine.name}")
            footprints[engine.name] = footprint(engine, parallel.rng, start)
        clock = clock_of(args)
        samples = in_rounds(
            {engine.name: partial(clock.ms, engine.step) for engine in engines}, args.repeats
        )
    return list(rows_of(setting, engines, footprints, samples)), contestants.skipped


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("recompute.py", (__doc__ or "").partition("\n")[0], repeats=9)
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
    unknown = sorted(set(args.engines) - engine_names(args.shape.num_layers))
    if unknown:
        parser.error(
            f"--engines {unknown[0]!r} must be one of "
            f"{', '.join(sorted(engine_names(args.shape.num_layers)))}"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0."""
    args = parse(argv)
    report: dict[str, Any] = {**new_report(args), "skipped": {}}
    print(heading(report), flush=True)
    parallel = ParallelState(device=args.device, rng=RngStreams(args.device, seed=SEED))
    for dtype, dropout in itertools.product(args.dtype, args.dropout):
        setting = Setting(
            shape=args.shape,
            device=args.device,
            dtype=dtype,
            dropout=dropout,
            attention_backend=args.attention_backend,
        )
        rows, skipped = measure(setting, parallel, args)
        print(
            f"\n{setting.dtype}, dropout {setting.dropout}: none takes {rows[0].ms:.1f} ms",
            HEADER,
            *table(rows),
            *(f"{name}: skipped: {reason}" for name, reason in skipped.items()),
            sep="\n",
            flush=True,
        )
        report["rows"] += [asdict(row) for row in rows]
        report["skipped"].update(skipped)
        write_report(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
