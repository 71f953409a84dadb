"""Times a training step beside other GPTs of the same shape, and beside the machine's matmul rate.

The engines (benchmarks/engines.py) take turns, A B C A B C .., and each round gives one ratio. A
disturbance of the machine therefore affects all engines alike. The benchmark runs in one process on
one device, with random tokens. benchmarks/README.md explains how to read the table.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import DTYPES, OURS, Setting, Shape, Step
from benchmarks.harness import (
    Clock,
    benchmark_parser,
    clock_of,
    heading,
    new_report,
    parse_benchmark,
    write_report,
)
from benchmarks.peer_engines import PEERS, build_engines
from megatron_lite.memory.predict.flops import step_flops


def model_gemms(setting: Setting) -> Callable[[], None]:
    """Returns a function that runs each linear layer's forward matmul once, on its own data."""
    shape, dtype = setting.shape, DTYPES[setting.dtype]
    h, tokens = shape.hidden_size, shape.batch_size * shape.seq_length
    sizes = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)] * shape.num_layers + [
        (h, shape.vocab_size)
    ]
    operands = {
        size: (
            torch.randn(tokens, size[0], device=setting.device, dtype=dtype),
            torch.randn(size[1], size[0], device=setting.device, dtype=dtype),
        )
        for size in set(sizes)
    }

    def run() -> None:
        for size in sizes:
            F.linear(*operands[size])

    return run


def gemm_flops(shape: Shape) -> int:
    """Returns the FLOPs of one run of the function that `model_gemms` returns."""
    h = shape.hidden_size
    weights = shape.num_layers * 12 * h * h + h * shape.vocab_size
    return 2 * shape.batch_size * shape.seq_length * weights


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one engine.

    gemm_fraction: the time of the model's matmul FLOPs at the measured matmul rate, over the step's
        time. The rate is measured between the steps.
    time_ratio: its time over ours, as (median, lower quartile, upper quartile) of the rounds. Above
        1 ours is faster.
    """

    engine: str
    dtype: str
    dropout: float
    ms: float
    tokens_per_second: float
    gemm_fraction: float
    gemm_tflops: float
    time_ratio: tuple[float, float, float]
    samples_ms: list[float]
    loss: float


def measure(setting: Setting, engines: dict[str, Step], clock: Clock, *, rounds: int) -> list[Row]:
    """Times every engine in turn, in `rounds` rounds after two rounds that warm up."""
    gemms = model_gemms(setting)
    losses = {name: step() for _ in range(2) for name, step in engines.items()}
    gemms()
    samples: dict[str, list[float]] = {name: [] for name in engines}
    gemm_ms = []
    for _ in range(rounds):
        for name, step in engines.items():
            samples[name].append(clock.ms(step))
        gemm_ms.append(clock.ms(gemms))
    gemm_rate = gemm_flops(setting.shape) / (statistics.median(gemm_ms) / 1000.0)
    flops = step_flops(
        setting.model_config(),
        batch=setting.shape.batch_size,
        seq_length=setting.shape.seq_length,
        padded_vocab_size=setting.shape.vocab_size,
    )
    rows = []
    for name, times in samples.items():
        ms = statistics.median(times)
        ratios = [theirs / ours for theirs, ours in zip(times, samples[OURS], strict=True)]
        low, middle, high = (
            statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
        )
        rows.append(
            Row(
                engine=name,
                dtype=setting.dtype,
                dropout=setting.dropout,
                ms=ms,
                samples_ms=times,
                tokens_per_second=setting.shape.batch_size * setting.shape.seq_length / ms * 1000.0,
                gemm_fraction=flops / gemm_rate / (ms / 1000.0),
                gemm_tflops=gemm_rate / 1e12,
                time_ratio=(middle, low, high),
                loss=losses[name].item(),
            )
        )
    return rows


HEADER = (
    f"{'dtype':8}{'dropout':>8}  {'engine':23}{'ms':>9}{'tokens/s':>11}{'GEMM':>6}   "
    f"{'time / ours (quartiles)':24}"
)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of one block."""
    for row in rows:
        middle, low, high = row.time_ratio
        ratio = "" if row.engine == OURS else f"{middle:.2f} ({low:.2f}-{high:.2f})"
        yield (
            f"{row.dtype:8}{row.dropout:8.1f}  "
            f"{row.engine:23}{row.ms:9.1f}{row.tokens_per_second:11.0f}{row.gemm_fraction:6.0%}   "
            f"{ratio:24}"
        ).rstrip()


def available_peers(wanted: str) -> list[str]:
    """Returns the peers to run. "auto" means transformers, or plain PyTorch if it is missing."""
    if wanted != "auto":
        return [wanted] if wanted != "both" else list(PEERS)
    try:
        import transformers  # noqa: F401
    except ImportError:
        return ["plain"]
    return ["transformers"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("step_time.py", (__doc__ or "").partition("\n")[0], repeats=15)
    parser.add_argument(
        "--peer",
        choices=["auto", "both", *PEERS],
        default="auto",
        help="auto (default): transformers, or plain where that is missing",
    )
    return parse_benchmark(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0."""
    args = parse(argv)
    report = new_report(args)
    print(heading(report), f"\n{HEADER}", sep="\n", flush=True)
    for dtype, dropout in itertools.product(args.dtype, args.dropout):
        setting = Setting(shape=args.shape, device=args.device, dtype=dtype, dropout=dropout)
        engines = build_engines(setting, available_peers(args.peer))
        rows = measure(setting, engines, clock_of(args), rounds=args.repeats)
        print(
            *table(rows),
            f"{'':18}matmuls alone: {rows[0].gemm_tflops:.3g} TFLOP/s",
            sep="\n",
            flush=True,
        )
        report["rows"] += [asdict(row) for row in rows]
        write_report(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
