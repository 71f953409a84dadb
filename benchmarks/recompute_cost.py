"""Measures what recomputation costs, and what compiled kernels change about it.

One run on one thread, by processor time: training steps without the optimizer under three policies,
without and with compiled kernels, in rounds in which every engine has its turn; then the cost of a
region in Python, and the start of a run with an empty and a filled cache.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import Setting, one_rank, our_model
from benchmarks.harness import (
    Clock,
    Progress,
    benchmark_parser,
    garbage_kept,
    new_report,
    parse_benchmark,
    spread,
    write_report,
)
from benchmarks.recompute_cost_page import figures
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.recompute import checkpoint as engine
from megatron_lite.recompute.schedule import plan_stage

POLICIES = {"none": "*:none", "pointwise": "*:pointwise", "full": "*:full"}
START = "start"


def steps(settings: Sequence[Setting], rounds: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each setting: the median ms of each engine, and ratios over the rounds."""
    for setting in settings:
        engines = dict(step_engines(setting))
        samples: dict[str, list[float]] = {name: [] for name in engines}
        clock = Clock(device=setting.device, kind="cpu")
        with garbage_kept():
            for number in range(-1, rounds):  # the first round warms up
                names = list(engines)
                first = number % len(names)
                for name in names[first:] + names[:first]:
                    milliseconds = clock.ms(engines[name])
                    if number >= 0:
                        samples[name].append(milliseconds)
        ratios = {
            f"{way} {policy}": spread(samples[f"{way} {policy}"], samples[f"{way} none"])
            for way in ("eager", "compiled")
            for policy in ("pointwise", "full")
        }
        ratios["compiled over eager"] = spread(samples["compiled none"], samples["eager none"])
        yield dict(
            dtype=setting.dtype,
            dropout=setting.dropout,
            ms={name: statistics.median(times) for name, times in samples.items()},
            ratios=ratios,
        )


def step_engines(setting: Setting) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields each engine's name and step. All engines share one set of weights."""
    first, batch = None, setting.batch()
    compiled = replace(setting, kernels=CompiledKernels(setting.device))
    for way, chosen in (("eager", setting), ("compiled", compiled)):
        for name, policy in POLICIES.items():
            plan = plan_stage(RecomputeConfig(recompute_policy=policy), setting.shape.num_layers)
            model = our_model(chosen, one_rank(setting), plan=plan)
            first = first or model
            model.load_state_dict(first.state_dict(keep_vars=True), assign=True)

            def step(model: Any = model) -> None:
                for parameter in model.parameters():
                    parameter.grad = None
                model.loss(batch.tokens, batch.labels).mean().backward()

            yield f"{way} {name}", step


def regions(num_regions: int = 20, rounds: int = 150) -> dict[str, float]:
    """Returns the fewest us of processor time for one region, in forward and backward together.

    The region is a multiplication of 16 numbers, so nearly all of it is Python.
    """
    weight, given = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)

    def chain(run: Callable[..., Any]) -> Callable[[], None]:
        def step() -> None:
            x = given
            for _ in range(num_regions):
                x = run(x)
            x.backward(x.detach())

        return step

    def multiply(x: Tensor) -> Tensor:
        return x * weight

    replayed = chain(lambda x: engine.checkpoint(multiply, x, rng=None))
    ways = {"kept": chain(multiply), "replayed": replayed}
    result = {name: _fewest_us(step, rounds) / num_regions for name, step in ways.items()}
    direct = engine._run_backward
    engine._run_backward = torch.autograd.backward  # type: ignore[assignment]
    try:
        result["by torch.autograd.backward"] = _fewest_us(replayed, rounds) / num_regions
    finally:
        engine._run_backward = direct
    return result


def _fewest_us(step: Callable[[], None], rounds: int) -> float:
    clock = Clock(device=torch.device("cpu"), kind="cpu")
    return min(1000.0 * clock.ms(step) for _ in range(rounds))


def starts(arguments: Sequence[str]) -> dict[str, float]:
    """Returns the processor seconds of a first step in a new process: eager, with an empty cache of
    compiled code, and with the cache that this start filled."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("eager", "empty cache", "filled cache"):
            done = subprocess.run(
                [sys.executable, __file__, START, name, *arguments],
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            result[name] = float(done.stdout.splitlines()[-1])
    return result


def first_step(name: str, setting: Setting) -> float:
    """Runs the first step of a process. Returns its processor seconds, the compiler's included."""
    chosen = "eager none" if name == "eager" else "compiled none"
    before = os.times()
    next(step for engine_name, step in step_engines(setting) if engine_name == chosen)()
    after = os.times()
    return sum(after[:4]) - sum(before[:4])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0."""
    argv = list(sys.argv[1:] if argv is None else argv)
    start = argv[1] if argv[:1] == [START] else None
    parser = benchmark_parser("recompute_cost.py", (__doc__ or "").partition("\n")[0], repeats=9)
    parser.set_defaults(threads=1, clock="cpu", device="cpu")
    args = parse_benchmark(parser, argv if start is None else argv[2:])
    settings = [
        Setting(shape=args.shape, device=args.device, dtype=dtype, dropout=dropout)
        for dtype in args.dtype
        for dropout in args.dropout
    ]
    if start is not None:
        print(first_step(start, settings[0]))
        return 0
    report: dict[str, Any] = new_report(args)
    del report["rows"]
    progress = Progress()
    report["regions"] = regions()
    report["steps"] = []
    for row in steps(settings, args.repeats):
        report["steps"].append(row)
        write_report(report, args.json)
        progress(f"{row['dtype']}, dropout {row['dropout']}: steps are done")
    report["starts"] = starts(_without_json(argv))
    write_report(report, args.json)
    print(figures(report))
    return 0


def _without_json(argv: Sequence[str]) -> list[str]:
    words = iter(argv)
    kept = []
    for word in words:
        if word == "--json":
            next(words)
        else:
            kept.append(word)
    return kept


if __name__ == "__main__":
    sys.exit(main())
