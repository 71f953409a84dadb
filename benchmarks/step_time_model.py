"""Compares the time model with steps that this machine runs.

The machine is a file of `python -m megatron_lite.tools.calibrate`. Every setting of a small grid of
shapes, formats, recompute policies and tensor-parallel sizes runs a few steps; the fastest counts.
With two ranks the program starts the second one itself. benchmarks/README.md explains the table.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import DTYPES, LEARNING_RATE, SEED, Setting, Shape, one_rank, our_model
from megatron_lite.config.data_settings import DataConfig, TokenizerConfig
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import TrainingConfig
from megatron_lite.model.stage_models import ModelStages
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.state import ParallelState, parallel_state
from megatron_lite.plan.hardware import Hardware, load_hardware
from megatron_lite.plan.step_time import step_time
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.training.micro_batches import StageRunner
from megatron_lite.training.step import train_step

CPU = torch.device("cpu")
POLICIES = ("*:none", "*:mlp", "*:full")


def shape(num_layers: int, hidden_size: int, seq_length: int) -> Shape:
    """Returns a shape with heads of 64 channels, or of 16 if it is narrow."""
    return Shape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // (64 if hidden_size >= 128 else 16),
        seq_length=seq_length,
        batch_size=2,
        vocab_size=1024,
    )


SHAPES = {
    "tiny": (shape(2, 64, 32),),
    "small": (
        shape(2, 128, 128),
        shape(4, 128, 128),
        shape(2, 256, 128),
        shape(2, 256, 256),
        shape(2, 512, 128),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting of the grid."""

    shape: Shape
    dtype: str
    policy: str
    tp: int

    @property
    def name(self) -> str:
        """The setting in a few words."""
        shape = self.shape
        return (
            f"L {shape.num_layers} h {shape.hidden_size} s {shape.seq_length} {self.dtype} "
            f"{self.policy} TP {self.tp}"
        )

    @property
    def recompute(self) -> RecomputeConfig:
        """The recompute policy."""
        return RecomputeConfig(recompute_policy=self.policy)

    def setting(self) -> Setting:
        """Returns the setting of the benchmarks' own models."""
        return Setting(shape=self.shape, device=CPU, dtype=self.dtype, dropout=0.0)

    def config(self) -> RunConfig:
        """Returns the run whose step the time model predicts."""
        return RunConfig(
            model=self.setting().model_config(),
            training=TrainingConfig(
                micro_batch_size=self.shape.batch_size,
                global_batch_size=self.shape.batch_size,
                bf16=self.dtype == "bf16",
            ),
            data=DataConfig(seq_length=self.shape.seq_length),
            tokenizer=TokenizerConfig(
                vocab_size=self.shape.vocab_size - 1, make_vocab_size_divisible_by=1
            ),
            parallel=ParallelConfig(tensor_model_parallel_size=self.tp, distributed_backend="gloo"),
            recompute=self.recompute,
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case with its times in milliseconds."""

    case: Case
    measured_ms: float
    predicted_ms: float

    @property
    def ratio(self) -> float:
        """The predicted time over the measured one."""
        return self.predicted_ms / self.measured_ms


def cases(args: argparse.Namespace) -> list[Case]:
    """Returns the grid, ordered by tensor-parallel size."""
    return [
        Case(shape=shape, dtype=dtype, policy=policy, tp=tp)
        for tp, shape, dtype, policy in itertools.product(
            args.tp, SHAPES[args.preset], args.dtype, POLICIES
        )
    ]


def build_step(case: Case, parallel: ParallelState) -> Callable[[], object]:
    """Returns a function that runs one training step of this rank."""
    setting = case.setting()
    plan = plan_stage(case.recompute, case.shape.num_layers, 0)
    model = our_model(setting, parallel, plan=plan)
    runner = StageRunner(ModelStages([model]), parallel)
    optimizer = Optimizer(model, OptimizerConfig(), parallel)
    batch = setting.batch()
    return lambda: train_step(runner, optimizer, (batch,), learning_rate=LEARNING_RATE)


def fastest_ms(step: Callable[[], object], clock: Callable[[], float], repeats: int) -> float:
    """Returns the milliseconds of the fastest of some steps. Two steps warm up."""
    times = []
    for number in range(repeats + 2):
        start = clock()
        step()
        if number >= 2:
            times.append((clock() - start) * 1000.0)
    return min(times)


def measure_alone(case: Case, args: argparse.Namespace) -> float:
    """Returns the milliseconds of a step in this process."""
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    return fastest_ms(build_step(case, one_rank(case.setting())), clock, args.repeats)


def measure_together(rank: int, folder: str, found: list[Case], repeats: int) -> list[float]:
    """Returns the milliseconds of a step of two ranks, for each case. Both ranks call it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(minutes=10),
    )
    try:
        times = []
        for case in found:
            with parallel_state(case.config().parallel, seed=SEED) as parallel:
                step = build_step(case, parallel)
                times.append(fastest_ms(step, time.perf_counter, repeats))
        return times
    finally:
        dist.destroy_process_group()


def measure(found: Sequence[Case], args: argparse.Namespace) -> Iterator[float]:
    """Yields the milliseconds of each case."""
    yield from (measure_alone(case, args) for case in found if case.tp == 1)
    together = [case for case in found if case.tp == 2]
    if together:
        with tempfile.TemporaryDirectory() as folder:
            other = multiprocessing.get_context("spawn").Process(
                target=measure_together, args=(1, folder, together, args.repeats), daemon=True
            )
            other.start()
            try:
                yield from measure_together(0, folder, together, args.repeats)
            finally:
                other.join(30.0)
                if other.is_alive():
                    other.kill()


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Returns Spearman's rank correlation."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        found = [0.0] * len(values)
        for position, index in enumerate(order):
            found[index] = float(position)
        return found

    return statistics.correlation(ranks(left), ranks(right))


def summary(found: Sequence[Row]) -> str:
    """Returns the rank correlation and the errors in one line."""
    ratios = [row.ratio for row in found]
    text = f"{len(found)} settings: "
    if len(found) > 2:
        correlation = rank_correlation(
            [row.predicted_ms for row in found], [row.measured_ms for row in found]
        )
        text += f"rank correlation {correlation:.2f}, "
    return (
        text + f"predicted / measured median {statistics.median(ratios):.2f}, from "
        f"{min(ratios):.2f} to {max(ratios):.2f}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="step_time_model.py",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument("--machine", required=True, help="a file of calibrate, or a known name")
    parser.add_argument("--preset", choices=list(SHAPES), default="small", help="default: small")
    parser.add_argument(
        "--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="default: both"
    )
    parser.add_argument("--tp", nargs="+", type=int, choices=[1, 2], default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="steps; default: 5")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: at TP 1 the processor time of one thread, for a machine that others use too",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0."""
    args = parse(argv)
    torch.set_num_threads(1)
    machine: Hardware = load_hardware(args.machine)
    grid = cases(args)
    print(f"{'setting':44}{'measured ms':>12}{'predicted ms':>14}{'ratio':>8}", flush=True)
    found = []
    for case, measured in zip(grid, measure(grid, args), strict=True):
        predicted = step_time(case.config(), machine, case.tp).seconds * 1000.0
        found.append(Row(case=case, measured_ms=measured, predicted_ms=predicted))
        print(f"{case.name:44}{measured:12.1f}{predicted:14.1f}{found[-1].ratio:8.2f}", flush=True)
    for tp in args.tp:
        print(f"TP {tp}, {summary([row for row in found if row.case.tp == tp])}")
    print(summary(found))
    if args.json:
        report = {"machine": asdict(machine), "rows": [asdict(row) for row in found]}
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
