"""Times training steps of processes with other heap settings or pinned threads, beside the default.

A setting holds for a whole process, so it needs processes of its own. Those of all settings live
at the same time and take turns in rounds; the others wait and use no processor time. The settings
of glibc's heap are those of `man mallopt`, and the variable for huge pages is torch's own. On
another C library the rows of the heap only show the noise. docs/performance.md has the table of one
run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.page_part import replace_part
from megatron_lite.parallel.heap import keep_freed_memory

BEGIN, END = "<!-- begin: process settings -->\n", "<!-- end: process settings -->"
DEFAULT = "glibc's own rules"
MARK = "@ "  # begins a worker's answer: other lines of its output are ignored
HUGE = str(2**32)


class ProcessSetting(NamedTuple):
    """A way to start the ranks.

    variables: added to the environment. keeps: whether the process keeps what it frees, as a run
    does (parallel/heap.py). pinned: whether each rank has a core of its own.
    """

    name: str
    variables: Mapping[str, str]
    keeps: bool = False
    pinned: bool = False


# Setting a threshold ends glibc's own adjustment of both, so a lone trim threshold leaves the mmap
# threshold at 128 KiB.
SETTINGS = (
    ProcessSetting(DEFAULT, {}),
    ProcessSetting("as a run: the process keeps what it frees", {}, keeps=True),
    ProcessSetting("the same, and each rank is pinned to a core", {}, keeps=True, pinned=True),
    ProcessSetting(
        "nothing is ever returned: `MALLOC_TRIM_THRESHOLD_` 4 GiB, `MALLOC_MMAP_MAX_=0`",
        {"MALLOC_TRIM_THRESHOLD_": HUGE, "MALLOC_MMAP_MAX_": "0"},
    ),
    ProcessSetting("`MALLOC_TRIM_THRESHOLD_` 4 GiB alone", {"MALLOC_TRIM_THRESHOLD_": HUGE}),
    ProcessSetting(
        "huge pages for the heap: `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`",
        {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    ),
    ProcessSetting(
        "huge pages for tensors from 2 MiB on: `THP_MEM_ALLOC_ENABLE=1`",
        {"THP_MEM_ALLOC_ENABLE": "1"},
    ),
)
OURS = sorted({name for setting in SETTINGS for name in setting.variables})


class Worker:
    """The processes of one setting. It is a context manager that ends them."""

    def __init__(self, setting: ProcessSetting, ranks: int, args: argparse.Namespace) -> None:
        self.name, self.ranks = setting.name, ranks
        self._folder = tempfile.TemporaryDirectory()
        environment = {key: value for key, value in os.environ.items() if key not in OURS}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **setting.variables}
        cores = sorted(os.sched_getaffinity(0)) if setting.pinned else [None] * ranks
        self._processes = []
        for rank in range(ranks):
            task = {
                "rank": rank,
                "ranks": ranks,
                "folder": self._folder.name,
                "core": cores[rank],
                "keeps": setting.keeps,
                "preset": args.preset,
                "dtype": args.dtype,
                "steps": args.steps,
            }
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--worker", json.dumps(task)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def ask(self, word: str) -> list[dict[str, float]]:
        """Sends a word to all ranks, and returns the answer of each.

        Raises RuntimeError if a rank has ended.
        """
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, float]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"a rank with {self.name} ended with status {process.wait()}")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._folder.cleanup()


def work(task: Mapping[str, Any]) -> int:
    """Runs one rank: a training step for each "step" that it reads. "end" ends it."""
    if task["core"] is not None:
        os.sched_setaffinity(0, {task["core"]})
    if task["keeps"]:
        keep_freed_memory()
    import resource
    import time

    import torch

    from benchmarks.engines import PRESETS, Setting
    from benchmarks.layouts import Layout, build_engine, split, state_of
    from benchmarks.rank_processes import joined
    from megatron_lite.parallel.shared_memory_setup import shared_memory_of

    torch.set_num_threads(1)
    ranks = task["ranks"]
    layout = Layout(ranks=1) if ranks == 1 else split(tensor_model_parallel_size=ranks)
    setting = Setting(
        shape=PRESETS[task["preset"]], device=torch.device("cpu"), dtype=task["dtype"], dropout=0.0
    )
    with ExitStack() as opened:
        opened.enter_context(
            nullcontext() if ranks == 1 else joined(task["rank"], ranks, task["folder"])
        )
        parallel = opened.enter_context(state_of(layout))
        opened.enter_context(shared_memory_of([parallel.tp_group], timeout=600.0, say=sys.exit))
        engine = build_engine(DEFAULT, layout, setting, setting.batch(), 1, parallel)
        for line in sys.stdin:
            if line.strip() == "end":
                kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                print(f"{MARK}{json.dumps({'mib': kib / 1024})}", flush=True)
                break
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(task["steps"]):
                engine.step()
            took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            print(f"{MARK}{json.dumps(took)}", flush=True)
    return 0


def measure(
    ranks: int, args: argparse.Namespace, settings: Sequence[ProcessSetting]
) -> Iterator[dict[str, Any]]:
    """Yields a row for each setting. A pinned one needs as many cores as ranks."""
    cores = len(os.sched_getaffinity(0))
    settings = [one for one in settings if not one.pinned or cores >= ranks]
    with ExitStack() as opened:
        workers = [opened.enter_context(Worker(one, ranks, args)) for one in settings]
        samples: dict[str, list[tuple[float, float]]] = {one.name: [] for one in settings}
        for number in range(-1, args.rounds):  # the first round warms up
            for place in range(len(workers)):
                worker = workers[(place + number) % len(workers)]
                times = worker.ask("step")
                if number >= 0:
                    wall, cpu = max(one["wall"] for one in times), sum(one["cpu"] for one in times)
                    samples[worker.name].append((wall, cpu))
        memory = {one.name: max(rank["mib"] for rank in one.ask("end")) for one in workers}
    for name, times in samples.items():
        ratios = [
            sorted(
                one[kind] / base[kind] for one, base in zip(times, samples[DEFAULT], strict=True)
            )
            for kind in (0, 1)
        ]
        yield {
            "name": name,
            "ranks": ranks,
            "wall_s": [wall / args.steps for wall, _ in times],
            "wall_ratio": [statistics.median(ratios[0]), ratios[0][0], ratios[0][-1]],
            "cpu_ratio": [statistics.median(ratios[1]), ratios[1][0], ratios[1][-1]],
            "resident_mib": memory[name],
        }


def table(report: Mapping[str, Any]) -> str:
    """Returns the part of the page: the machine, and a table in Markdown."""
    lines = [
        f"{report['device']}, {report['cores']} cores, 1 thread for each rank, torch "
        f'{report["torch"]}, shape "{report["preset"]}", {report["dtype"]}, '
        f"{report['rounds']} rounds of {report['steps']} steps.",
        "",
        "| setting | ranks | wall time | least to most | processor time | resident memory, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        middle, low, high = row["wall_ratio"]
        lines.append(
            f"| {row['name']} | {row['ranks']} | {middle:.2f} | {low:.2f} to {high:.2f} "
            f"| {row['cpu_ratio'][0]:.2f} | {row['resident_mib']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(
        prog="process_settings.py",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="default: 9")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="of a turn; default: 2")
    parser.add_argument("--preset", default="medium", help="the shape; default: medium")
    parser.add_argument("--dtype", choices=["float32", "bf16"], default="float32")
    parser.add_argument(
        "--ranks", type=int, nargs="+", choices=[1, 2], default=[1, 2], help="default: 1 2"
    )
    parser.add_argument("--json", metavar="FILE", help="also write every sample")
    parser.add_argument("--output", type=Path, metavar="PAGE", help="write the table into PAGE")
    args = parser.parse_args(argv)
    if min(args.rounds, args.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    return args


def main(argv: Sequence[str] | None = None, settings: Sequence[ProcessSetting] = SETTINGS) -> int:
    """Runs the benchmark. Returns 0."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--worker"]:
        return work(json.loads(argv[1]))
    args = parse(argv)
    import torch

    from benchmarks.harness import device_name, write_report

    report: dict[str, Any] = {
        "device": device_name(torch.device("cpu")),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "preset": args.preset,
        "dtype": args.dtype,
        "rounds": args.rounds,
        "steps": args.steps,
        "rows": [],
    }
    for ranks in args.ranks:
        report["rows"] += measure(ranks, args, settings)
        write_report(report, args.json)
    print(table(report))
    if args.output is not None:
        replace_part(args.output, BEGIN, END, table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
