"""Times forward and backward of one model in every library that can build it, side by side.

    bash benchmarks/run.sh          makes an environment with the peers, and runs this program in it

Each block is one setting: model, shape, dtype, threads, tensor-parallel size. It runs in processes
of its own (benchmarks/side_by_side_block.py). In a block all contestants
(benchmarks/side_by_side_engines.py) have the same weights and take turns in rounds. If one of them
fails, the block runs again without it. benchmarks/README.md explains what is measured.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import DTYPES
from benchmarks.harness import device_name, write_report
from benchmarks.side_by_side_block import run_ranks
from benchmarks.side_by_side_engines import OURS
from benchmarks.side_by_side_report import draw, table, versions
from benchmarks.side_by_side_task import CPU, SHAPES, Block, Notes, Task

FULL_SHAPES = ("8x512", "12x768", "4x2048")
RESULTS = ROOT / "benchmarks" / "results"
PAGES_JSON = RESULTS / "cpu" / "side-by-side.json"  # docs/performance-peers.md shows it
# Instructions that multiply bf16 matrices, as Linux names them: x86 and ARM.
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
SAME_SETTING = ("family", "shape", "dtype", "threads", "tp_size", "sequence_parallel")
Result = dict[str, Any]


def blocks_of(args: argparse.Namespace) -> list[Block]:
    """Returns the settings that the options ask for. The Llama blocks are of one rank."""
    found = []
    for shape, dtype, tp_size, threads, family in itertools.product(
        args.shapes, args.dtype, args.tp, args.threads, args.models
    ):
        if family == "llama" and tp_size > 1:
            continue
        for sequence_parallel in (False, True)[:tp_size]:
            found.append(
                Block(
                    family=family,
                    shape=shape,
                    dtype=dtype,
                    threads=threads,
                    tp_size=tp_size,
                    sequence_parallel=sequence_parallel,
                    rounds=args.rounds,
                    compiled=not args.no_compile and tp_size == 1,
                )
            )
    return found


def is_meant(name: str, chosen: Sequence[str] | None) -> bool:
    """Returns whether one of the texts is meant to choose the contestant of this name.

    A text chooses the contestants whose names have all of its words. None chooses all of them.
    """
    words = set(re.split(r"[, ]+", name.lower()))
    return chosen is None or any(words >= set(text.lower().split()) for text in chosen)


def bf16_instructions() -> list[str]:
    """Returns which of BF16_INSTRUCTIONS this processor has. Empty if nothing tells."""
    with suppress(OSError):
        found = set(Path("/proc/cpuinfo").read_text().split())
        return [name for name in BF16_INSTRUCTIONS if name in found]
    return []


def in_processes(task: Task) -> int:
    """Runs a task in new processes, and returns the exit status. None of them outlives the call."""
    command = [sys.executable, __file__, "--one-block", task.to_json()]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            return process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run_block(
    block: Block,
    names: Sequence[str],
    minutes: float | None = None,
    start: Callable[[Task], int] = in_processes,
) -> Result:
    """Runs a block until no contestant fails. Returns its result.

    failed: the reasons by contestant or library. names: who is to be measured. minutes: the time
    limit. If ours without recomputation fails, the result has no rows.
    """
    began, failed = time.monotonic(), dict[str, str]()
    known = {*block.libraries, *block.libraries.values()}
    while True:
        left = None if minutes is None else max(0.0, minutes - (time.monotonic() - began) / 60.0)
        with tempfile.TemporaryDirectory() as folder:
            task = Task(
                block=block, folder=folder, names=tuple(names), without=tuple(failed), minutes=left
            )
            status = start(task)
            if task.result.is_file():
                return {**json.loads(task.result.read_text()), "failed": failed}
            culprit = Notes.culprit(folder, status)
        if culprit is None:
            failed["block"] = f"the process ended with status {status}"
        else:
            print(f"{block.title}: {culprit.name} failed: {culprit.reason}", file=sys.stderr)
        if culprit is None or culprit.name in (OURS, *failed) or culprit.name not in known:
            failed |= {} if culprit is None else {culprit.name: culprit.reason}
            return {
                "block": asdict(block),
                "title": block.title,
                "rows": [],
                "skipped": {},
                "failed": failed,
            }
        failed[culprit.name] = culprit.reason


def joined(old: Result, new: Result) -> Result:
    """Returns the result of a block with the rows of both runs.

    A row keeps its ratios, each of which is to ours in the same run. Rows of `old` come first.
    """
    libraries = Block(**old["block"]).libraries
    there = {row["name"] for row in old["rows"]}
    rows = old["rows"] + [row for row in new["rows"] if row["name"] not in there]
    order = {name: number for number, name in enumerate(libraries)}
    rows.sort(key=lambda row: order.get(row["name"], len(order)))
    mended = {row["name"] for row in new["rows"]}
    mended |= {libraries[name] for name in mended if name in libraries}
    notes = {}
    for kind in ("skipped", "failed"):
        left = {name: why for name, why in old.get(kind, {}).items() if name not in mended}
        notes[kind] = {**left, **new[kind]}
    return {**old, "rows": rows, **notes}


def new_report(args: argparse.Namespace) -> dict[str, Any]:
    """Returns a report without blocks."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(CPU),
        "bf16_instructions": bf16_instructions(),
        "is_quick": args.quick,
        "settings": {name: getattr(args, name) for name in ("rounds", "shapes", "dtype", "tp")}
        | {"threads": args.threads, "models": args.models, "compiled": not args.no_compile},
        "versions": versions(),
        "blocks": [],
    }


def opened(args: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Returns the report to add to: with --continue that of the file, if it exists.

    Raises ValueError if the file is of another machine or of other versions.
    """
    report = new_report(args)
    if not args.goes_on or not output.is_file():
        return report
    old = json.loads(output.read_text())
    for key in ("device", "versions"):
        if old[key] != report[key]:
            raise ValueError(
                f"--continue needs results of this machine and these versions: {output} has the "
                f"{key} {old[key]}, and this run has {report[key]}"
            )
    return old


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, metavar="N", help="default: 9; with --quick 3")
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="of a block: fewer rounds if it is short"
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), help="default: the large three"
    )
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), help="default: both")
    parser.add_argument("--threads", nargs="+", type=int, help="of a rank; default: 1 2")
    parser.add_argument("--tp", nargs="+", type=int, help="default: 1 2")
    parser.add_argument("--models", nargs="+", choices=["gpt", "llama"], default=["gpt", "llama"])
    parser.add_argument(
        "--contestants",
        type=lambda text: [part for part in text.split(",") if part.strip()],
        metavar="A,B",
        help=f"only those with these words in their names, beside '{OURS}': "
        "--contestants 'plain,megatron-core sdpa none'",
    )
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--quick", action="store_true", help="a small shape, float32, one thread")
    parser.add_argument(
        "--continue",
        action="store_true",
        dest="goes_on",
        help="measure what the JSON lacks, or has as failed, and add it",
    )
    parser.add_argument(
        "--output",
        help="name in benchmarks/results; default: cpu/side-by-side, which docs/performance-peers"
        ".md shows; with --quick side-by-side",
    )
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (3 if args.quick else 9)
    args.shapes = args.shapes or (["quick"] if args.quick else list(FULL_SHAPES))
    args.dtype = args.dtype or (["float32"] if args.quick else list(DTYPES))
    args.threads = args.threads or ([1] if args.quick else [1, 2])
    args.tp = args.tp or [1, 2]
    args.output = args.output or ("side-by-side" if args.quick else "cpu/side-by-side")
    if args.rounds < 1 or min(args.threads) < 1 or not set(args.tp) <= {1, 2}:
        parser.error("--rounds and --threads must be at least 1, and --tp 1 or 2")
    if args.minutes is not None and args.minutes <= 0:
        parser.error(f"--minutes must be above 0 (got {args.minutes})")
    names = {name for block in blocks_of(args) for name in block.libraries}
    for text in args.contestants or ():
        if not any(is_meant(name, [text]) for name in names):
            parser.error(f"--contestants: none of these has the words {text!r}: {sorted(names)}")
    return args


def add(report: dict[str, Any], block: Block, args: argparse.Namespace) -> Result | None:
    """Runs a block and adds its result to the report. Returns None if nothing is missing."""
    found = [
        one
        for one in report["blocks"]
        if all(one["block"][key] == asdict(block)[key] for key in SAME_SETTING)
    ]
    there = {row["name"] for one in found for row in one["rows"]}
    names = [
        name for name in block.libraries if is_meant(name, args.contestants) and name not in there
    ]
    if not names:
        return None
    result = run_block(block, names, args.minutes)
    if there:
        result = joined(found[0], result)
    if found:
        report["blocks"][report["blocks"].index(found[0])] = result
    else:
        report["blocks"].append(result)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all blocks. Returns 0, or 1 if something failed or a contestant did other work."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--one-block"]:
        return run_ranks(Task.from_json(argv[1]))
    args = parse(argv)
    output = RESULTS / f"{args.output}{'-quick' * args.quick}.json"
    try:
        report = opened(args, output)
    except ValueError as error:
        print(f"run.sh: error: {error}", file=sys.stderr)
        return 2
    status = 0
    for block in blocks_of(args):
        result = add(report, block, args)
        if result is None:
            print(f"{block.title}: {output.name} has every row")
            continue
        print(*table(result), sep="\n", flush=True)
        if result["failed"] or not all(row["same_work"] for row in result["rows"]):
            status = 1
        write_report(report, str(output))
    if output == PAGES_JSON:
        print("now write the page: python -m tests.docs.generate --write docs/performance-peers.md")
    else:
        print(*(f"wrote {picture}" for picture in draw(report, output)), sep="\n")
    print(f"wrote {output}")
    return status


if __name__ == "__main__":
    sys.exit(main())
