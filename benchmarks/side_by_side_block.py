"""One block of benchmarks/side_by_side.py: a setting, in processes of its own.

All contestants of a block have the same weights and take turns in rounds. A contestant may raise an
error or end the process. The ranks note who runs (side_by_side_task.Notes), so that the program
which started them can run the block again without that one.
"""

from __future__ import annotations

import datetime
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.contestant import Contestant
from benchmarks.engines import Setting
from benchmarks.harness import Progress, garbage_kept, spread
from benchmarks.rank_processes import other_ranks
from benchmarks.recompute import CPU_FLASH, rank_of
from benchmarks.recompute_engines import Place
from benchmarks.side_by_side_engines import OURS, build_contestants
from benchmarks.side_by_side_task import Block, Notes, Task
from benchmarks.step_time import gemm_flops, model_gemms
from megatron_lite.memory.measure.allocator_peak import allocator_peak
from megatron_lite.memory.predict.flops import step_flops
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.shared_memory_setup import shared_memory_of
from megatron_lite.parallel.state import ParallelState

LOSSES_DIFFER = {"float32": 1e-4, "bf16": 2e-2}  # relative


def measure(task: Task, parallel: ParallelState, notes: Notes) -> dict[str, Any]:
    """Measures the contestants of a block. Every rank calls it at the same time.

    Ours without recomputation is measured even if nobody asks for it. If it alone is left, the
    result has no rows.
    """
    block, setting = task.block, task.block.setting()
    until = None if task.minutes is None else time.monotonic() + 60.0 * task.minutes
    torch.set_num_threads(block.threads)
    libraries = {block.libraries[name] for name in block.libraries if task.wants(name)}
    if "megatron-core" in libraries and task.wants("megatron-core"):
        notes("megatron-core")
        prepare_megatron_core(block.tp_size)
    place = Place(parallel=parallel, sequence_parallel=block.sequence_parallel)
    contestants, skipped = build_contestants(
        block.family, setting, place, compiled=block.compiled, wanted=task.wants, note=notes
    )
    result = {"block": asdict(block), "title": block.title, "skipped": skipped, "rows": []}
    if len(contestants) == 1 and task.names is not None and OURS not in task.names:
        return result
    gemms = model_gemms(setting)
    progress = Progress(quiet=parallel.rank > 0)
    found: dict[str, dict[str, Any]] = {}
    with garbage_kept():
        for one in contestants:
            progress(f"{block.title}: {one.name}")
            notes(one.name)
            found[one.name] = facts(one, parallel.rng)
        samples = in_rounds(contestants, gemms, block, parallel, progress, until=until, note=notes)
    if parallel.rank == 0:
        result["rows"] = rows(block, setting, found, samples)
    return result


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
    *,
    until: float | None = None,
    note: Callable[[str], object] = lambda name: None,
) -> Times:
    """Returns the times of the slowest rank. Each round begins with another contestant.

    until: no round starts that would end after this time of time.monotonic(), except the first.
    note: called with the name of each contestant before its turn.
    """
    actions = [(one.name, one.clear, one.run) for one in contestants]
    actions.append((GEMMS, lambda: None, gemms))
    samples: Times = {name: [] for name, _, _ in actions}
    for number in range(-1, block.rounds):  # the first round warms up
        began = time.monotonic()
        for turn in range(len(actions)):
            name, clear, run = actions[(turn + number) % len(actions)]
            progress(f"{block.title}: round {number + 1} of {block.rounds}, {name}")
            note(name)
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
        now = time.monotonic()
        is_late = until is not None and now + (now - began) > until
        if number >= 0 and any(_of_ranks(is_late, parallel)):
            break
    of_ranks = _of_ranks(samples, parallel)
    return {
        name: [
            (max(one[0] for one in times), max(one[1] for one in times))
            for times in zip(*(rank[name] for rank in of_ranks), strict=True)
        ]
        for name in samples
    }


def _of_ranks(value: Any, parallel: ParallelState) -> list[Any]:
    """Returns the value of every rank. Issues an all-gather if there are several."""
    if parallel.tp_group is None:
        return [value]
    found: list[Any] = [None] * parallel.tp_size
    dist.all_gather_object(found, value, parallel.tp_group)
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


def rows(
    block: Block, setting: Setting, found: dict[str, dict[str, Any]], samples: Times
) -> list[dict[str, Any]]:
    """Returns the figures of each contestant.

    gemm_fraction: the time that the model's FLOPs need at the rate of its matmuls alone, over the
    wall time of the step. same_work: whether parameters, loss, and FLOPs without recomputation
    equal ours. FLOPs may differ by 5 %, and by half of attention's: ours skips keys that a causal
    mask hides (megatron_lite/model/causal_blocks.py), and the others' kernels compute some of them.
    """
    shape, ours = setting.shape, found[OURS]
    # A flash kernel has two products of [s, s, h] in forward, and five in backward.
    attention = 14 * shape.num_layers * shape.batch_size * shape.seq_length**2 * shape.hidden_size
    most_apart = 0.05 * (ours["flops"] or 0) + attention / block.tp_size / 2
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
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    for name, own in found.items():
        times = dict(zip(("wall", "cpu"), zip(*samples[name], strict=True), strict=True))
        base = dict(zip(("wall", "cpu"), zip(*samples[OURS], strict=True), strict=True))
        differs = abs(own["loss"] / ours["loss"] - 1.0)
        plain = name.endswith("none") and own["flops"] is not None
        table.append(
            {
                "name": name,
                "date": date,
                "rounds": len(samples[name]),
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
                    and (not plain or abs(own["flops"] - ours["flops"]) < most_apart)
                ),
            }
        )
    return table


def run_task(task: Task, rank: int, folder: str) -> None:
    """Runs one rank of a block. Rank 0 writes the result. folder: where the ranks meet.

    Ends the process with status 1 after an error, which it notes.
    """
    notes = Notes(task.folder, rank)
    try:
        with (
            rank_of(task.block.tp_size, rank, folder) as parallel,
            # A run opens it by itself. Here the process group existed before.
            shared_memory_of(
                [parallel.tp_group], timeout=300.0, say=partial(print, file=sys.stderr)
            ),
        ):
            result = measure(task, parallel, notes)
    except Exception as error:
        notes.failed(error)
        print(f"{task.block.title}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
    if rank == 0:
        task.result.write_text(json.dumps(result))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_ranks(task: Task) -> int:
    """Runs all ranks of a block, this process as rank 0. Returns the exit status."""
    with other_ranks(partial(run_task, task), task.block.tp_size) as folder:
        run_task(task, 0, folder)
    return 0
