"""The parts that the benchmarks share: the clock, the options, and the report."""

import argparse
import contextlib
import datetime
import gc
import itertools
import json
import math
import platform
import re
import signal
import statistics
import sys
import time
import timeit
from functools import partial
from pathlib import Path

import torch

from benchmarks.engines import DTYPES, PRESETS
from megatron_lite.data.durable_files import write_text
from megatron_lite.memory.measure.live_storages import allocator_peak


def timed(action, device, *, kind="wall", steps=1):
    """Returns the milliseconds per call over `steps` calls, including the device's work.

    kind: "wall" is the time that a user waits. "cpu" is this process's processor time, which other
        programs on the machine hardly disturb.
    """
    now = time.process_time if kind == "cpu" else time.perf_counter

    def waited():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return now()

    return timeit.timeit(action, timer=waited, number=steps) * 1000.0 / steps


class OutOfTime(Exception):
    """SIGTERM came, as from `timeout`."""

    def __str__(self):
        return "no time left"


def end_with_what_there_is():
    """Makes the first SIGTERM raise OutOfTime in the main thread; later ones have no effect.

    Python drops what is raised in a finalizer. It is then raised again a little later.
    """

    def stop(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise OutOfTime

    def dropped(found):
        if found.exc_type is OutOfTime:
            signal.setitimer(signal.ITIMER_REAL, 0.1)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, stop)
    sys.unraisablehook = dropped


def progress(text):
    """Shows on a terminal what is measured now, in place of what it showed before."""
    if sys.stderr.isatty():
        print(f"\r{text[:78]:78}", end="", file=sys.stderr, flush=True)


def peak_above(action, device):
    """Returns the most bytes of the device's allocator during the action, above those before."""
    gc.collect()
    if device.type != "cuda":
        with allocator_peak() as found:
            action()
        return found.peak_bytes
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    return torch.cuda.max_memory_allocated(device) - before


def in_rounds(measured, rounds, until=math.inf):
    """Returns what each function measures in each round.

    Each round begins with another one. One round before them, which does not count, warms up.
    until: no round after the first begins later, by `time.monotonic`. OutOfTime ends them too:
        only what has been measured as often as all others counts, or at least once.
    """
    samples = {name: [] for name in measured}
    names = list(measured)
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # the collections of each turn skip the objects that exist now
    with contextlib.suppress(OutOfTime):
        for number in range(-1, rounds):
            if number > 0 and time.monotonic() > until:
                break
            for turn in range(len(names)):
                name = names[(turn + number) % len(names)]
                progress(f"round {number + 1} of {rounds}, {name}")
                gc.collect()
                sample = measured[name]()
                if number >= 0:
                    samples[name].append(sample)
    whole = max(1, min(map(len, samples.values()), default=1))
    return {name: found[:whole] for name, found in samples.items() if found}


def plain_parser(about, *, repeats):
    """Returns a parser with the options that every timing command has. about: its docstring."""
    description = about.partition("\n")[0]
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    add_number(parser, "--repeats", repeats, "rounds, in each of which every engine is timed once")
    add_number(parser, "--threads", None, "CPU threads; default: torch's choice")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: one thread's processor time on a CPU, for a machine that others use too",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write settings and every sample, after each block of rows",
    )
    return parser


def add_number(parser, flag, default, text):
    """Adds a flag that takes a whole number."""
    more = "" if default is None else "; default: %(default)s"
    parser.add_argument(flag, type=int, default=default, metavar="N", help=text + more)


def add_preset(parser, default):
    """Adds the flag of the model's shape."""
    parser.add_argument(
        "--preset", choices=PRESETS, default=default, help="the shape; default: %(default)s"
    )


def add_device(parser):
    """Adds the flag of the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = "cpu, cuda, cuda:1 ..; default: cuda where there is one"
    parser.add_argument("--device", type=torch.device, default=device, help=text)


def benchmark_parser(about, *, repeats):
    """Returns a parser with the options of a benchmark of models."""
    parser = plain_parser(about, repeats=repeats)
    add_device(parser)
    dtypes = list(DTYPES)
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes, help="default: both")
    parser.add_argument(
        "--dropout", nargs="+", type=float, default=[0.0, 0.1], help="default: 0.0 0.1"
    )
    add_preset(parser, "small")
    text = "steps between two looks at the clock; default: 1 on a CPU, 5 on CUDA"
    add_number(parser, "--steps-per-round", None, text)
    return parser


def spread(times, others):
    """Returns the ratios of two engines' times, round by round."""
    ratios = [time / other for time, other in zip(times, others, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def parse_benchmark(parser, argv):
    """Returns the parsed options, with `device` and `shape` where they are no options. Sets the
    threads."""
    args = parser.parse_args(argv)
    if args.clock == "cpu":
        args.threads = 1
    if args.clock == "cpu" or "device" not in args:
        args.device = torch.device("cpu")
    if "preset" in args:
        args.shape = PRESETS[args.preset]
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return args


def clock_of(args):
    """Returns the clock that the options ask for, which returns the milliseconds of an action."""
    steps = getattr(args, "steps_per_round", None) or (5 if args.device.type == "cuda" else 1)
    return partial(timed, device=args.device, kind=args.clock, steps=steps)


def new_report(args):
    """Prints and returns a report with machine and settings, and without rows."""
    report = {
        **about(args.device),
        "threads": torch.get_num_threads(),
        "settings": {
            name: str(value) for name, value in vars(args).items() if name not in ("json", "shape")
        },
        "shape": args.shape._asdict() if "shape" in args else {},
        "rows": [],
        "skipped": {},
    }
    print(
        f"{report['device']}, {report['threads']} CPU thread(s), torch {report['torch']}, "
        f"{args.clock} time, medians of {args.repeats} rounds",
        getattr(args, "shape", ""),
        sep="\n",
        flush=True,
    )
    return report


def about(device):
    """Returns the day, the name of the device, and the versions of torch and CUDA."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def blocks(args, setting, measure):
    """Yields the rows of each dtype and dropout, which it has published.

    setting: makes the setting of a block. measure: returns its rows, and gets a dict for those who
        are left out, with the reasons.
    """
    report = new_report(args)
    end_with_what_there_is()
    skipped = report["skipped"]
    for dtype, dropout in itertools.product(args.dtype, args.dropout):
        rows = []
        try:
            one = setting(shape=args.shape, device=args.device, dtype=dtype, dropout=dropout)
            rows = measure(one, args, skipped)
        except OutOfTime as reason:
            skipped["the rest"] = str(reason)
        publish(report, rows, args.json)
        yield rows
    for who, why in skipped.items():
        print(f"{who} left out: {why}")


# The columns of the tables: a field of a row, its heading, and its format. A ratio of times is the
# median of the rounds, with the least and the most.
COLUMNS = {
    "what": ("row", ""),
    "name": ("contestant", ""),
    "engine": ("engine", ""),
    "dtype": ("dtype", ""),
    "dropout": ("dropout", ""),
    "launches": ("launches", ","),
    "kernel_ms": ("kernels, ms", ",.1f"),
    "ms": ("ms", ",.1f"),
    "ratio": ("time / ours", ""),
    "step_ms": ("whole step, ms", ",.1f"),
    "step_ratio": ("step / ours", ""),
    "time_ratio": ("time / none", ""),
    "rival_time_ratio": ("time / that of ours", ""),
    "per_second": ("a second", ",.0f"),
    "unit": ("of", ""),
    "kept_bytes": ("kept, MiB", ",.2f"),
    "kept_ratio": ("of none", ".0%"),
    "peak_bytes": ("peak, MiB", ",.2f"),
    "extra_flops": ("FLOPs above none", ".1%"),
    "of_matmuls": ("of the matmul rate", ".0%"),
}


def table(rows, **headings):
    """Yields the lines of a table in Markdown of the rows' fields that COLUMNS has.

    headings: other headings than those of COLUMNS.
    """
    names = [name for name in COLUMNS if name in rows[0]]
    cells = [[headings.get(name, COLUMNS[name][0]) for name in names]]
    cells += [[_cell(name, row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    for line in cells:
        yield f"| {' | '.join(map(str.ljust, line, widths))} |"


def _cell(name, value):
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        middle, least, most = value
        return f"{middle:.2f} ({least:.2f} to {most:.2f})"
    return format(value / 2**20 if name.endswith("bytes") else value, COLUMNS[name][1])


def publish(report, rows, file, **headings):
    """Prints a block of rows, and writes the report with it. It is called after every block, so a
    run cut short leaves its results."""
    if rows:
        print("", *table(rows, **headings), sep="\n", flush=True)
    report["rows"] += rows
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(report, indent=1) + "\n")


def device_name(device):
    """Returns the name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = re.search("model name\t: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()
