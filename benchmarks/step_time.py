"""Times a training step beside other libraries' models of the same shape, with the same weights.

Two figures for each contestant: forward and backward alone, and the whole step with clipping and
AdamW. benchmarks/README.md explains how to read the table. On a GPU the table has the peak of
forward and backward too, above what weights, gradients and optimizer hold before.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.contestants import OUR_POLICIES, OURS, PEERS, build_contestants
from benchmarks.engines import DTYPES, LAYER_8B, SETTINGS, Setting, Shape
from benchmarks.harness import (
    Clock,
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
from benchmarks.peers import Contestant
from benchmarks.recompute_engines import policies
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.memory.predict.flops import hardware_flops, peak_flops, step_flops
from megatron_lite.recompute.schedule import plan_stage

# Per parameter in bf16: ours has 2 bytes of weight, 4 of gradient, 12 of masters and moments. Each
# of two peers has 2 of weight and 4 of moments, and one of them at a time 2 of gradient.
BYTES_PER_PARAMETER = 18 + 2 * 6 + 2
SHARE = 0.6  # of the free memory for these; the rest is for activations
LINEAR = "linear layers alone"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one contestant.

    ms, step_ms: of forward and backward, and of the whole step.
    ratio, step_ratio: its time over that of ours without recomputation, over the rounds.
    of_matmuls: the model's FLOPs at the rate of its linear layers alone, over `ms`.
    mfu, hfu: the model's FLOPs, and those that ran, over `ms` and the data sheet's peak.
    peak_bytes: on a GPU, above what was there before.
    """

    name: str
    dtype: str
    dropout: float
    loss: float
    peak_bytes: int | None
    ms: float
    ratio: Spread
    step_ms: float
    step_ratio: Spread
    tokens_per_second: float
    of_matmuls: float
    mfu: float | None
    hfu: float | None
    samples_ms: list[float]


def fitting(device: torch.device) -> Shape:
    """Returns the 8B stack with as many layers as fit the device, from 1 to 32."""
    hidden, vocab = LAYER_8B.hidden_size, LAYER_8B.vocab_size
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    left = SHARE * free / BYTES_PER_PARAMETER - 2 * hidden * vocab
    return replace(LAYER_8B, num_layers=max(1, min(32, int(left / (12 * hidden * hidden)))))


def linear_layers(setting: Setting) -> tuple[Callable[[], None], int]:
    """Returns a function that runs each linear layer's forward matmul once, and its FLOPs."""
    config, shape = setting.model_config(), setting.shape
    h, wide = config.hidden_size, config.ffn_size
    into = 2 * wide if config.swiglu else wide
    sizes = [(h, 3 * h), (h, h), (h, into), (wide, h)] * shape.num_layers + [(h, shape.vocab_size)]
    like: dict[str, Any] = dict(device=setting.device, dtype=DTYPES[setting.dtype])
    operands = {
        (m, n): (torch.randn(setting.tokens, m, **like), torch.randn(n, m, **like))
        for m, n in set(sizes)
    }

    def run() -> None:
        for size in sizes:
            F.linear(*operands[size])

    return run, 2 * setting.tokens * sum(m * n for m, n in sizes)


def warm(one: Contestant, device: torch.device) -> tuple[float, int | None]:
    """Runs the contestant twice. Returns its loss, and on a GPU its peak."""
    is_cuda = device.type == "cuda"
    before = 0
    for _ in range(2):  # the first run builds kernels and workspaces
        one.clear()
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        loss = one.run().item()
    peak = torch.cuda.max_memory_allocated(device) - before if is_cuda else None
    one.clear()
    return loss, peak


def hardware_flops_of(name: str, setting: Setting) -> int | None:
    """Returns the FLOPs that one of our policies runs; None for a peer."""
    policy = OUR_POLICIES.get(name.split(", ")[1]) if name.startswith("ours, ") else None
    if policy is None:
        return None
    shape = setting.shape
    flags = policies(shape.num_layers)[policy]
    return hardware_flops(
        setting.model_config(),
        plan_stage(RecomputeConfig(**flags), shape.num_layers),
        batch=shape.batch_size,
        seq_length=shape.seq_length,
        padded_vocab_size=shape.vocab_size,
        device=setting.device.type,
    )


def timed(
    contestants: Sequence[Contestant], clock: Clock, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Returns the milliseconds of forward and backward, then of the step, of each round."""

    def alone(run: Callable[[], Tensor], clear: Callable[[], None]) -> Callable[[], float]:
        def measured() -> float:
            clear()
            ms = clock.ms(run)
            clear()
            return ms

        return measured

    return (
        in_rounds({one.name: alone(one.run, one.clear) for one in contestants}, rounds),
        in_rounds({one.name: alone(one.step, one.clear) for one in contestants}, rounds),
    )


def measure(
    setting: Setting, args: argparse.Namespace, skipped: dict[str, str], peak_rate: float | None
) -> list[Row]:
    """Returns a row of each contestant that the memory is enough for."""
    contestants, missing = build_contestants(setting, peers=args.peers, compiled=args.compile)
    skipped.update(missing)
    first = {}
    for one in contestants:  # a contestant that fails leaves the others alone
        try:
            first[one.name] = warm(one, setting.device)
        except (RuntimeError, ImportError) as reason:
            skipped[one.name] = str(reason).splitlines()[0][:150]
            one.clear()
        gc.collect()
    running = [one for one in contestants if one.name in first]
    clock, shape = clock_of(args), setting.shape
    run, linear_flops = linear_layers(setting)
    with garbage_kept():
        linear_ms = in_rounds({LINEAR: lambda: clock.ms(run)}, args.repeats)[LINEAR]
        samples, steps = timed(running, clock, args.repeats)
    rate = linear_flops / statistics.median(linear_ms)
    flops = step_flops(
        setting.model_config(),
        batch=shape.batch_size,
        seq_length=shape.seq_length,
        padded_vocab_size=shape.vocab_size,
    )
    rows = []
    for name, times in samples.items():
        ms, ran = statistics.median(times), hardware_flops_of(name, setting)
        share = None if peak_rate is None else 1000.0 / ms / peak_rate
        loss, peak = first[name]
        rows.append(
            Row(
                name=name,
                dtype=setting.dtype,
                dropout=setting.dropout,
                loss=loss,
                peak_bytes=peak,
                ms=ms,
                ratio=spread(times, samples[OURS]),
                step_ms=statistics.median(steps[name]),
                step_ratio=spread(steps[name], steps[OURS]),
                tokens_per_second=setting.tokens / ms * 1000.0,
                of_matmuls=flops / rate / ms,
                mfu=None if share is None else flops * share,
                hfu=None if share is None or ran is None else ran * share,
                samples_ms=times,
            )
        )
    return rows


HEADER = (
    f"{'':30}{'forward and backward':>34}{'':24}{'whole step':>27}\n{'contestant':30}{'ms':>9}"
    f"{'/ ours':>19}{'peak GiB':>10}{'matmuls':>8}{'MFU':>6}{'HFU':>6}{'ms':>9}{'/ ours':>19}"
)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of one block."""
    for row in rows:
        peak = "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}"
        shares = "".join(f"{'-' if of is None else f'{of:.0%}':>6}" for of in (row.mfu, row.hfu))
        ratios = [
            f"{mid:.2f} ({low:.2f}-{high:.2f})" for mid, low, high in (row.ratio, row.step_ratio)
        ]
        yield (
            f"{row.name:30}{row.ms:9.1f}{ratios[0]:>19}{peak:>10}{row.of_matmuls:8.0%}{shares}"
            f"{row.step_ms:9.1f}{ratios[1]:>19}"
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("step_time.py", (__doc__ or "").partition("\n")[0], repeats=9)
    parser.add_argument("--family", choices=list(SETTINGS), default="gpt", help="default: gpt")
    parser.add_argument(
        "--stack-8b", action="store_true", help="layers of an 8B model, as many as the card holds"
    )
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--compile", action="store_true", help="also torch.compile's contestants")
    args = parse_benchmark(parser, argv)
    if args.stack_8b:
        args.shape = fitting(args.device)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0, or 1 if the losses of the contestants differ."""
    args = parse(argv)
    report = {**new_report(args), "family": args.family, "skipped": {}}
    print(heading(report), f"\n{HEADER}", sep="\n", flush=True)
    status = 0
    for dtype, dropout in itertools.product(args.dtype, args.dropout):
        setting = SETTINGS[args.family](
            shape=args.shape, device=args.device, dtype=dtype, dropout=dropout
        )
        peak = peak_flops(report["device"], bf16=dtype == "bf16")
        rows = measure(setting, args, report["skipped"], peak)
        print(f"{dtype}, dropout {dropout}", *table(rows), sep="\n", flush=True)
        losses = [row.loss for row in rows]
        if not dropout and max(losses) - min(losses) > 2e-2 * max(losses):
            print(f"the contestants compute different losses: {losses}", file=sys.stderr)
            status = 1
        report["rows"] += [asdict(row) for row in rows]
        write_report(report, args.json)
    for who, why in report["skipped"].items():
        print(f"{who} left out: {why}")
    write_report(report, args.json)
    return status


if __name__ == "__main__":
    sys.exit(main())
