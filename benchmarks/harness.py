"""The parts that the benchmarks share: the clock, the options, and the report."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.engines import DTYPES, PRESETS, Shape

Spread = tuple[float, float, float]  # median, minimum, maximum
Sample = TypeVar("Sample")


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Measures the time of an action.

    kind: "wall" is the time that a user waits. "cpu" is this process's processor time, which other
        programs on the machine hardly disturb.
    steps: how many calls are timed together.
    """

    device: torch.device
    kind: str = "wall"
    steps: int = 1

    def ms(self, action: Callable[[], object]) -> float:
        """Returns the milliseconds per call over `steps` calls, including the device's work."""
        now = time.process_time if self.kind == "cpu" else time.perf_counter
        self._wait()
        start = now()
        for _ in range(self.steps):
            action()
        self._wait()
        return (now() - start) * 1000.0 / self.steps

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Progress:
    """Prints lines on stderr, at most one in ten seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._last > 10.0:
            self._last = time.monotonic()
            print(text, file=sys.stderr, flush=True)


def in_rounds(measured: Mapping[str, Callable[[], Sample]], rounds: int) -> dict[str, list[Sample]]:
    """Returns what each function measures in each round.

    Each round begins with another one. One round before them, which does not count, warms up.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in measured}
    names, progress = list(measured), Progress()
    for number in range(-1, rounds):
        for turn in range(len(names)):
            name = names[(turn + number) % len(names)]
            progress(f"round {number + 1} of {rounds}, {name}")
            gc.collect()
            sample = measured[name]()
            if number >= 0:
                samples[name].append(sample)
    return samples


def benchmark_parser(program: str, description: str, *, repeats: int) -> argparse.ArgumentParser:
    """Returns a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ..; default: cuda where there is one"
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="default: both"
    )
    parser.add_argument(
        "--dropout", nargs="+", type=float, default=[0.0, 0.1], help="default: 0.0 0.1"
    )
    parser.add_argument(
        "--preset", choices=list(PRESETS), default="small", help="the shape; default: small"
    )
    for field in Shape.__dataclass_fields__:
        parser.add_argument(
            f"--{field.replace('_', '-')}", type=int, metavar="N", help="instead of the preset's"
        )
    parser.add_argument(
        "--repeats",
        type=int,
        default=repeats,
        metavar="N",
        help=f"rounds, in each of which every engine is timed once; default: {repeats}",
    )
    parser.add_argument(
        "--steps-per-round",
        type=int,
        metavar="N",
        help="steps between two looks at the clock; default: 1 on a CPU, 5 on CUDA",
    )
    add_clock_arguments(parser)
    return parser


def add_clock_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that every timing command has: --threads, --clock and --json."""
    parser.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads; default: torch's choice"
    )
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help=(
            "cpu: processor time, for a machine that others use too; needs --threads 1 and the CPU"
        ),
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write settings and every sample, after each block of rows",
    )


def spread(times: Sequence[float], others: Sequence[float]) -> Spread:
    """Returns the ratios of two engines' times, round by round."""
    ratios = [time / other for time, other in zip(times, others, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def parse_benchmark(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Returns the parsed options, with `device` resolved and `shape` added. Sets the threads."""
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
    if args.clock == "cpu" and (args.threads != 1 or args.device.type != "cpu"):
        parser.error(
            "--clock cpu reads one thread's processor time: it needs --threads 1 and --device cpu"
        )
    chosen = {
        field: getattr(args, field)
        for field in Shape.__dataclass_fields__
        if getattr(args, field) is not None
    }
    args.shape = Shape(**{**asdict(PRESETS[args.preset]), **chosen})
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return args


def clock_of(args: argparse.Namespace) -> Clock:
    """Returns the clock that the options ask for."""
    return Clock(
        device=args.device,
        kind=args.clock,
        steps=args.steps_per_round or (5 if args.device.type == "cuda" else 1),
    )


def new_report(args: argparse.Namespace) -> dict[str, Any]:
    """Returns a report with machine and settings, and without rows."""
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "shape")}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(getattr(args, "device", torch.device("cpu"))),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "settings": {name: str(value) for name, value in settings.items()},
        "shape": asdict(args.shape) if hasattr(args, "shape") else {},
        "rows": [],
    }


def heading(report: dict[str, Any]) -> str:
    """Returns two lines: the machine, and the shape that is measured."""
    settings = report["settings"]
    return (
        f"{report['device']}, {report['threads']} CPU thread(s), torch {report['torch']}, "
        f"{settings.get('clock', 'wall')} time, medians of {settings['repeats']} rounds\n"
        + ", ".join(f"{name} {value}" for name, value in report["shape"].items())
    )


def write_report(report: dict[str, Any], file: str | None) -> None:
    """Writes the report. It is called after every block, so a run cut short leaves its results."""
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps(report, indent=1) + "\n")


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Turns off automatic garbage collection inside the block. gc.collect() still works."""
    gc.collect()
    gc.freeze()  # later collections skip the objects that exist now
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
