"""Times what a user waits for before a run trains: help, plans, explanations, and the start.

Every command is a process of its own, and the commands take turns in rounds. The time of a start
ends with the line of the first iteration. The quickstart runs once, from start to end, with the
environment that is installed. docs/performance.md has the table of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.page_part import replace_part
from benchmarks.startup import FIRST, RUN, clocked

BEGIN, END = "<!-- begin: planning seconds -->\n", "<!-- end: planning seconds -->"
QUICKSTART = "quickstart"
PLAN = "--model llama3-8b --seq-length 8192 --gpus 8 --gpu h100-80gb --global-batch-size 512"
LAUNCHER = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc_per_node 2"
ONE_RANK = RUN.replace("--tensor-model-parallel-size 2 --sequence-parallel ", "")


class Command(NamedTuple):
    """A command of Python.

    name: what the table calls it. until: the text in whose line of the output the time ends; "":
    with the process.
    """

    name: str
    arguments: str
    until: str = ""


COMMANDS = (
    Command("`python -c 'import torch'`, for comparison", "-c import\ttorch"),
    Command("`megatron-lite --help`", "-m megatron_lite --help"),
    Command("`pretrain_gpt.py --help`", "pretrain_gpt.py --help"),
    Command("`megatron-lite plan`, Llama 3 8B on 8 GPUs", f"-m megatron_lite plan {PLAN}"),
    Command("`megatron-lite explain` of a small model", f"-m megatron_lite explain {ONE_RANK}"),
    Command("start to the first iteration, 1 rank", f"pretrain_gpt.py {ONE_RANK}", FIRST),
    Command(
        "start to the first iteration, `torchrun` with 2 ranks",
        f"{LAUNCHER} pretrain_gpt.py {RUN}",
        FIRST,
    ),
)


def timed(command: Command) -> dict[str, float]:
    """Returns the wall time, and the processor time of all processes, in seconds.

    Raises SystemExit if the command fails.
    """
    words = [word.replace("\t", " ") for word in command.arguments.split(" ")]
    start = time.perf_counter()
    seen, cpu = clocked([sys.executable, *words], command.until)
    return {"wall": seen or time.perf_counter() - start, "cpu": cpu}


def measure(
    commands: Sequence[Command], rounds: int, time_of: Callable[[Command], dict[str, float]] = timed
) -> list[dict[str, Any]]:
    """Returns a row for each command. Each round begins with another command."""
    samples: dict[str, list[dict[str, float]]] = {command.name: [] for command in commands}
    for number in range(-1, rounds):  # the first round warms up: files, and caches of bytecode
        for place in range(len(commands)):
            command = commands[(place + number) % len(commands)]
            took = time_of(command)
            if number >= 0:
                samples[command.name].append(took)
    return [
        {
            "name": name,
            "wall_s": statistics.median(one["wall"] for one in times),
            "wall_samples_s": [one["wall"] for one in times],
            "cpu_s": statistics.median(one["cpu"] for one in times),
        }
        for name, times in samples.items()
    ]


def quickstart() -> dict[str, Any]:
    """Runs the quickstart once in a new folder, and returns its row. It has no processor time.

    Raises CalledProcessError if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run(
            ["bash", "examples/quickstart.sh"],
            cwd=ROOT,
            env={**os.environ, "OUTPUT": f"{folder}/quickstart"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        wall_s = time.perf_counter() - start
    return {"name": QUICKSTART, "wall_s": wall_s, "wall_samples_s": [wall_s], "cpu_s": None}


def table(report: Mapping[str, Any]) -> str:
    """Returns the part of the page: the machine, and a table in Markdown."""
    lines = [
        f"{report['device']}, {report['processors']} processors, torch {report['torch']}, Python "
        f"{report['python']}, medians of {report['rounds']} rounds; the quickstart ran once.",
        "",
        "| command | seconds | least to most | processor seconds |",
        "|---|---|---|---|",
    ]
    for row in report["rows"]:
        cpu = "" if row["cpu_s"] is None else f"{row['cpu_s']:.2f}"
        samples = row["wall_samples_s"]
        lines.append(
            f"| {row['name']} | {row['wall_s']:.2f} | {min(samples):.2f} to {max(samples):.2f} "
            f"| {cpu} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0."""
    parser = argparse.ArgumentParser(
        prog="planning_seconds.py",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--no-quickstart", action="store_true", help="without the quickstart")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample")
    parser.add_argument("--output", type=Path, metavar="PAGE", help="write the table into PAGE")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    import torch

    from benchmarks.harness import device_name

    report: dict[str, Any] = {
        "device": device_name(torch.device("cpu")),
        "processors": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "rounds": args.rounds,
        "rows": measure(COMMANDS, args.rounds),
    }
    if not args.no_quickstart:
        report["rows"].append(quickstart())
    print(table(report))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.output is not None:
        replace_part(args.output, BEGIN, END, table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
