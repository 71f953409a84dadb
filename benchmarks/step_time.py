"""Times one training step of megatron_lite beside other GPTs of the same shape, and beside the machine's matmul rate.

The engines (benchmarks/engines.py) take turns, A B C A B C .., so that a disturbed machine disturbs all of them alike, and
each round gives one ratio. One process, one device, random tokens. How to read the table: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import DTYPES, OURS, PEERS, PRESETS, Setting, Shape, Step, build_engines  # noqa: E402
from megatron_lite.memory.flops import step_flops  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Clock:
    """wall: what a user waits for. cpu: this thread's processor time, which other processes on the machine hardly disturb."""

    device: torch.device
    kind: str = "wall"
    steps: int = 1

    def ms(self, action: Callable[[], object]) -> float:
        """Milliseconds per call over `steps` calls, the device's work included."""
        now = time.thread_time if self.kind == "cpu" else time.perf_counter
        self._wait()
        start = now()
        for _ in range(self.steps):
            action()
        self._wait()
        return (now() - start) * 1000.0 / self.steps

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def model_gemms(setting: Setting) -> Callable[[], None]:
    """Runs each forward matmul of the model's linear layers once, alone, on data of its own."""
    shape, dtype = setting.shape, DTYPES[setting.dtype]
    h, tokens = shape.hidden_size, shape.batch_size * shape.seq_length
    sizes = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)] * shape.num_layers + [(h, shape.vocab_size)]
    operands = {size: (torch.randn(tokens, size[0], device=setting.device, dtype=dtype),
                       torch.randn(size[1], size[0], device=setting.device, dtype=dtype)) for size in set(sizes)}

    def run() -> None:
        for size in sizes:
            F.linear(*operands[size])

    return run


def gemm_flops(shape: Shape) -> int:
    """FLOPs of one `model_gemms` run."""
    h = shape.hidden_size
    return 2 * shape.batch_size * shape.seq_length * (shape.num_layers * 12 * h * h + h * shape.vocab_size)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine's result. time_ratio: its time / ours, median and quartiles over the rounds; above 1, ours is faster.

    gemm_fraction: time of the model's matmul FLOPs at the rate measured between the steps / time of the step.
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
    """Rounds of every engine in turn, after two rounds to warm up."""
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
    flops = step_flops(setting.model_config(), batch=setting.shape.batch_size, seq_length=setting.shape.seq_length,
                       padded_vocab_size=setting.shape.vocab_size)
    rows = []
    for name, times in samples.items():
        ms = statistics.median(times)
        ratios = [theirs / ours for theirs, ours in zip(times, samples[OURS], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
        rows.append(Row(engine=name, dtype=setting.dtype, dropout=setting.dropout, ms=ms, samples_ms=times,
                        tokens_per_second=setting.shape.batch_size * setting.shape.seq_length / ms * 1000.0,
                        gemm_fraction=flops / gemm_rate / (ms / 1000.0), gemm_tflops=gemm_rate / 1e12,
                        time_ratio=(middle, low, high), loss=losses[name].item()))
    return rows


def profile(setting: Setting, engines: dict[str, Step], *, steps: int = 3, top: int = 20) -> str:
    """Self time of the most expensive operators of each engine, in ms per step."""
    from torch.profiler import ProfilerActivity

    cuda = setting.device.type == "cuda"
    lines = []
    for name, step in engines.items():
        step()
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
                                    record_shapes=not cuda) as trace:
            Clock(device=setting.device, steps=steps).ms(step)
        averages = trace.key_averages()
        cost = {event: getattr(event, "self_device_time_total" if cuda else "self_cpu_time_total") / 1000.0 / steps
                for event in averages}
        lines.append(f"\n{name}, {setting.dtype}, dropout {setting.dropout}: {sum(cost.values()):.1f} ms per step in operators")
        for event in sorted(cost, key=lambda event: -cost[event])[:top]:
            lines.append(f"  {cost[event]:9.2f} ms {event.count // steps:6d} calls  {event.key[:60]}")
    return "\n".join(lines)


HEADER = f"{'dtype':8}{'dropout':>8}  {'engine':23}{'ms':>9}{'tokens/s':>11}{'GEMM':>6}   {'time / ours (quartiles)':24}"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of one block."""
    for row in rows:
        middle, low, high = row.time_ratio
        ratio = "" if row.engine == OURS else f"{middle:.2f} ({low:.2f}-{high:.2f})"
        yield (f"{row.dtype:8}{row.dropout:8.1f}  {row.engine:23}{row.ms:9.1f}{row.tokens_per_second:11.0f}"
               f"{row.gemm_fraction:6.0%}   {ratio:24}").rstrip()


def device_name(device: torch.device) -> str:
    """What a reader needs to know of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def available_peers(wanted: str) -> list[str]:
    """The peers to run: "auto" is transformers, or plain PyTorch where it is missing."""
    if wanted != "auto":
        return [wanted] if wanted != "both" else list(PEERS)
    try:
        import transformers  # noqa: F401
    except ImportError:
        return ["plain"]
    return ["transformers"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="step_time.py", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ..; default: cuda where there is one")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="default: both")
    parser.add_argument("--dropout", nargs="+", type=float, default=[0.0, 0.1], help="default: 0.0 0.1")
    parser.add_argument("--peer", choices=["auto", "both", *PEERS], default="auto",
                        help="auto (default): transformers, or plain where that is missing")
    parser.add_argument("--preset", choices=list(PRESETS), default="small", help="the shape; default: small")
    for field in Shape.__dataclass_fields__:
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, metavar="N", help="instead of the preset's")
    parser.add_argument("--repeats", type=int, default=15, metavar="N",
                        help="rounds, in each of which every engine is timed once; default: 15")
    parser.add_argument("--steps-per-round", type=int, metavar="N",
                        help="steps between two looks at the clock; default: 1 on a CPU, 5 on CUDA")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: torch's choice")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall",
                        help="cpu: processor time, for a machine that others use too; needs --threads 1 and the CPU")
    parser.add_argument("--json", metavar="FILE", help="also write settings and every sample, after each block of rows")
    parser.add_argument("--profile", action="store_true", help="also print each engine's most expensive operators")
    args = parser.parse_args(argv)
    args.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    if args.clock == "cpu" and (args.threads != 1 or args.device.type != "cpu"):
        parser.error("--clock cpu reads one thread's processor time: it needs --threads 1 and --device cpu")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0."""
    args = parse(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    chosen = {field: getattr(args, field) for field in Shape.__dataclass_fields__ if getattr(args, field) is not None}
    shape = Shape(**{**asdict(PRESETS[args.preset]), **chosen})
    clock = Clock(device=args.device, kind=args.clock, steps=args.steps_per_round or (5 if args.device.type == "cuda" else 1))
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "device": device_name(args.device),
        "torch": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(), "clock": clock.kind,
        "rounds": args.repeats, "steps_per_round": clock.steps, "shape": asdict(shape), "rows": []}
    print(f"{report['device']}, {report['threads']} CPU thread(s), torch {torch.__version__}, {clock.kind} time, medians of "
          f"{args.repeats} rounds", ", ".join(f"{name} {value}" for name, value in asdict(shape).items()), f"\n{HEADER}",
          sep="\n", flush=True)
    profiles = []
    for dtype, dropout in itertools.product(args.dtype, args.dropout):
        setting = Setting(shape=shape, device=args.device, dtype=dtype, dropout=dropout)
        engines = build_engines(setting, available_peers(args.peer))
        rows = measure(setting, engines, clock, rounds=args.repeats)
        print(*table(rows), f"{'':18}matmuls alone: {rows[0].gemm_tflops:.3g} TFLOP/s", sep="\n", flush=True)
        report["rows"] += [asdict(row) for row in rows]
        if args.profile:
            profiles.append(profile(setting, engines))
        if args.json:  # after every block: a run that is cut short leaves what it measured
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
            Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    print(*profiles, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
