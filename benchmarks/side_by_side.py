"""Times forward and backward of one model in every library that can build it, side by side.

    bash benchmarks/run.sh          makes an environment with the peers, and runs this program in it

Each block is one setting: model, shape, dtype, threads, tensor-parallel size. It runs in processes
of its own. In a block all contestants (benchmarks/side_by_side_engines.py) have the same weights
and take turns in rounds. benchmarks/README.md explains what is measured.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import DTYPES, PRESETS, Setting, Shape
from benchmarks.harness import Progress, device_name, spread, write_report
from benchmarks.rank_processes import other_ranks
from benchmarks.recompute import CPU_FLASH, garbage_kept, rank_of
from benchmarks.recompute_engines import Place
from benchmarks.side_by_side_engines import OURS, Contestant, LlamaSetting, build_contestants
from benchmarks.side_by_side_report import draw, table, versions
from benchmarks.step_time import gemm_flops, model_gemms
from megatron_lite.memory.measure.allocator_peak import allocator_peak
from megatron_lite.memory.predict.flops import step_flops
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.state import ParallelState

CPU = torch.device("cpu")
SHAPES = {
    "8x512": PRESETS["medium"],
    "12x768": Shape(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        seq_length=512,
        batch_size=1,
        vocab_size=50304,
    ),
    "4x2048": Shape(
        num_layers=4,
        hidden_size=2048,
        num_attention_heads=16,
        seq_length=512,
        batch_size=1,
        vocab_size=32768,
    ),
    "quick": PRESETS["small"],
    "tiny": PRESETS["tiny"],
}
FULL_SHAPES = ("8x512", "12x768", "4x2048")
LOSSES_DIFFER = {"float32": 1e-4, "bf16": 2e-2}  # relative


@dataclass(frozen=True, kw_only=True)
class Block:
    """One setting. threads: of each rank."""

    family: str
    shape: str
    dtype: str
    threads: int
    tp_size: int
    sequence_parallel: bool
    rounds: int
    compiled: bool

    @property
    def title(self) -> str:
        """The setting in words."""
        parallel = f"TP {self.tp_size}{' + SP' if self.sequence_parallel else ''}"
        return f"{self.family} {self.shape}, {self.dtype}, {self.threads} thread(s), {parallel}"

    def setting(self) -> Setting:
        """Returns what the engines are built from."""
        kind = Setting if self.family == "gpt" else LlamaSetting
        return kind(shape=SHAPES[self.shape], device=CPU, dtype=self.dtype, dropout=0.0)


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


def facts(one: Contestant, rng: RngStreams) -> dict[str, Any]:
    """Returns loss, FLOPs and bytes of a contestant; None where torch.compile hides them.

    peak_bytes: what torch's allocator had at most in forward and backward, above what was there
    before: weights, and gradients to which backward adds.
    """
    start = rng.snapshot()
    counting = (
        nullcontext()
        if one.is_compiled
        else FlopCounterMode(display=False, custom_mapping=CPU_FLASH)
    )
    with torch.autograd.set_multithreading_enabled(False):
        one.clear()
        rng.restore(start)
        with counting as counter:
            loss = one.run().item()
        rng.restore(start)
        gc.collect()
        with allocator_peak() as peak:
            one.run()
    return dict(
        loss=loss,
        flops=None if counter is None else counter.get_total_flops(),
        parameters=sum(parameter.numel() for parameter in one.parameters),
        peak_bytes=peak.peak_bytes,
    )


def measure(block: Block, parallel: ParallelState) -> dict[str, Any]:
    """Measures all contestants of a block. Every rank calls it at the same time."""
    torch.set_num_threads(block.threads)
    setting = block.setting()
    if block.family == "gpt":
        prepare_megatron_core(block.tp_size)
    place = Place(parallel=parallel, sequence_parallel=block.sequence_parallel)
    contestants, skipped = build_contestants(block.family, setting, place, compiled=block.compiled)
    gemms = model_gemms(setting)
    progress = Progress(quiet=parallel.rank > 0)
    found: dict[str, dict[str, Any]] = {}
    with garbage_kept():
        for one in contestants:
            progress(f"{block.title}: {one.name}")
            try:
                found[one.name] = facts(one, parallel.rng)
            except Exception as reason:  # a peer's or a compiler's; the others still run
                if block.tp_size > 1:
                    raise
                skipped[one.name] = f"{type(reason).__name__}: {str(reason)[:200]}"
        running = [one for one in contestants if one.name in found]
        samples = in_rounds(running, gemms, block, parallel, progress)
    return {
        "block": asdict(block),
        "title": block.title,
        "skipped": skipped,
        "rows": rows(block, setting, found, samples) if parallel.rank == 0 else [],
    }


def prepare_megatron_core(tp_size: int) -> None:
    """Gives megatron-core the CPU, if it is installed and a process group exists."""
    from benchmarks.megatron_engines import on_cpu

    with suppress(ImportError):
        on_cpu(tp_size)


GEMMS = "matmuls alone"
Times = dict[str, list[tuple[float, float]]]  # by contestant: (wall ms, processor ms) of each round


def in_rounds(
    contestants: Sequence[Contestant],
    gemms: Any,
    block: Block,
    parallel: ParallelState,
    progress: Progress,
) -> Times:
    """Returns the times of the slowest rank. Each round begins with another contestant."""
    actions = [(one.name, one.clear, one.run) for one in contestants]
    actions.append((GEMMS, lambda: None, gemms))
    samples: Times = {name: [] for name, _, _ in actions}
    for number in range(-1, block.rounds):  # the first round warms up
        for turn in range(len(actions)):
            name, clear, run = actions[(turn + number) % len(actions)]
            progress(f"{block.title}: round {number + 1} of {block.rounds}, {name}")
            clear()
            gc.collect()
            if parallel.tp_group is not None:
                dist.barrier(parallel.tp_group)
            wall, processor = time.perf_counter(), time.process_time()
            run()
            took = (time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3
            clear()
            if number >= 0:
                samples[name].append(took)
    if parallel.tp_group is None:
        return samples
    of_ranks: list[Any] = [None] * parallel.tp_size
    dist.all_gather_object(of_ranks, samples, parallel.tp_group)
    return {
        name: [
            (max(one[0] for one in times), max(one[1] for one in times))
            for times in zip(*(rank[name] for rank in of_ranks), strict=True)
        ]
        for name in samples
    }


def rows(
    block: Block, setting: Setting, found: dict[str, dict[str, Any]], samples: Times
) -> list[dict[str, Any]]:
    """Returns the figures of each contestant.

    gemm_fraction: the time that the model's FLOPs need at the rate of its matmuls alone, over the
    wall time of the step. same_work: whether parameters, loss, and FLOPs without recomputation
    equal ours. FLOPs may differ by 5 %: our attention skips keys that a causal mask hides
    (megatron_lite/model/causal_blocks.py), and the others' kernel computes some of them.
    """
    shape, ours = setting.shape, found[OURS]
    rate = gemm_flops(shape) / statistics.median(wall for wall, _ in samples[GEMMS])
    bound_ms = (
        step_flops(
            setting.model_config(),
            batch=shape.batch_size,
            seq_length=shape.seq_length,
            padded_vocab_size=shape.vocab_size,
        )
        / block.tp_size
        / rate
    )
    table = []
    for name, own in found.items():
        times = dict(zip(("wall", "cpu"), zip(*samples[name], strict=True), strict=True))
        base = dict(zip(("wall", "cpu"), zip(*samples[OURS], strict=True), strict=True))
        differs = abs(own["loss"] / ours["loss"] - 1.0)
        plain = name.endswith("none") and own["flops"] is not None
        table.append(
            {
                "name": name,
                **own,
                **{f"{clock}_ms": statistics.median(times[clock]) for clock in times},
                **{f"{clock}_ratio": spread(times[clock], base[clock]) for clock in times},
                **{f"{clock}_samples_ms": list(times[clock]) for clock in times},
                "peak_ratio": own["peak_bytes"] / ours["peak_bytes"],
                "gemm_fraction": bound_ms / statistics.median(times["wall"]),
                "same_work": bool(
                    own["parameters"] == ours["parameters"]
                    and math.isfinite(differs)
                    and differs < LOSSES_DIFFER[block.dtype]
                    and (not plain or abs(own["flops"] / ours["flops"] - 1.0) < 0.05)
                ),
            }
        )
    return table


def run_block(block: Block, output: Path | None, rank: int, folder: str) -> None:
    """Runs one rank of a block. Rank 0 writes the result to `output`."""
    with rank_of(block.tp_size, rank, folder) as parallel:
        result = measure(block, parallel)
    if output is not None:
        output.write_text(json.dumps(result))


def other_rank(block: Block, rank: int, folder: str) -> None:
    """Runs a rank other than 0."""
    run_block(block, None, rank, folder)


def in_own_process(block: Block) -> dict[str, Any]:
    """Runs a block in a new process. Returns its result, or why it has none."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--one-block", json.dumps(asdict(block)), str(output)]
        status = subprocess.run(command, check=False).returncode
        if output.is_file():
            return json.loads(output.read_text())
    failed = {"block": f"the process ended with status {status}"}
    return {"block": asdict(block), "title": block.title, "rows": [], "skipped": failed}


def one_block(text: str, output: str) -> int:
    """Runs the block of this process."""
    block = Block(**json.loads(text))
    with other_ranks(partial(other_rank, block), block.tp_size) as folder:
        run_block(block, Path(output), 0, folder)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, metavar="N", help="default: 9; with --quick 3")
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), help="default: the large three"
    )
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), help="default: both")
    parser.add_argument("--threads", nargs="+", type=int, help="of a rank; default: 1 2")
    parser.add_argument("--tp", nargs="+", type=int, help="default: 1 2")
    parser.add_argument("--models", nargs="+", choices=["gpt", "llama"], default=["gpt", "llama"])
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--quick", action="store_true", help="a small shape, float32, one thread")
    parser.add_argument("--output", default="side-by-side", help="name in benchmarks/results")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (3 if args.quick else 9)
    args.shapes = args.shapes or (["quick"] if args.quick else list(FULL_SHAPES))
    args.dtype = args.dtype or (["float32"] if args.quick else list(DTYPES))
    args.threads = args.threads or ([1] if args.quick else [1, 2])
    args.tp = args.tp or [1, 2]
    if args.rounds < 1 or min(args.threads) < 1 or not set(args.tp) <= {1, 2}:
        parser.error("--rounds and --threads must be at least 1, and --tp 1 or 2")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all blocks. Returns 0, or 1 if a block failed or a contestant did other work."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--one-block"]:
        return one_block(*argv[1:])
    args = parse(argv)
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(CPU),
        "is_quick": args.quick,
        "settings": {name: getattr(args, name) for name in ("rounds", "shapes", "dtype", "tp")}
        | {"threads": args.threads, "models": args.models, "compiled": not args.no_compile},
        "versions": versions(),
        "blocks": [],
    }
    output = ROOT / "benchmarks" / "results" / f"{args.output}{'-quick' * args.quick}.json"
    status = 0
    for block in blocks_of(args):
        result = in_own_process(block)
        report["blocks"].append(result)
        print(*table(result), sep="\n", flush=True)
        if not result["rows"] or not all(row["same_work"] for row in result["rows"]):
            status = 1
        write_report(report, str(output))
    for picture in draw(report, output):
        print(f"wrote {picture}")
    print(f"wrote {output}")
    return status


if __name__ == "__main__":
    sys.exit(main())
