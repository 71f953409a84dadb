"""Checks what `--recompute-policy auto --memory-budget` promises, in real steps on the CPU.

    budget | policy of auto | its peak | the next plan's peak | time / best hand-set policy

For each budget: the measured peak of the policy that auto chooses, which must not exceed the
budget; the measured peak of the plan that auto would choose with the next larger budget, which
must exceed it; and the time of a step, as a ratio to the fastest policy of Megatron's own flags
whose measured peak fits too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from arguments import parse_args
from benchmarks.step_peaks import LEARNING_RATE, measure, samples
from megatron_lite.config.run import RunConfig
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.state import ParallelState, parallel_state
from megatron_lite.plan.auto_policy import Unreachable, fitted
from megatron_lite.plan.hardware import load_hardware
from megatron_lite.plan.memo import Memo
from megatron_lite.plan.planned_run import Chosen, Run, with_policy
from megatron_lite.training.apex_kernels import fuse_weight_gradients_
from megatron_lite.training.batches import MicroBatches
from megatron_lite.training.build_trainer import build_stages
from megatron_lite.training.micro_batches import StageRunner
from megatron_lite.training.step import train_step
from tests.support.ranks import run_ranks

MIB = 2.0**20
NUM_LAYERS, NUM_MICROBATCHES = 6, 2
FLAGS = (
    f"--num-layers {NUM_LAYERS} --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 4 --vocab-size 1000 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --loss-chunk-size 64 --mock-data --lr 1e-3 "
    "--train-iters 2 --distributed-backend gloo"
)
# What a user of Megatron's flags can set by hand.
SELECTIVE = ("core_attn", "layernorm", "mlp", "core_attn+layernorm", "core_attn+mlp")
UNITS = (1, 2, 3, 6)
HAND_SET = (
    "*:none",
    *(f"*:{modules}" for modules in SELECTIVE),
    *(f"*:full/{length}" for length in UNITS),
    *(f"0-{count - 1}:full; *:none" for count in range(1, NUM_LAYERS)),
)


class Limits(NamedTuple):
    """The predicted peaks between which budgets matter.

    least: the smallest that a policy reaches. most: the one without recomputation.
    """

    least: int
    most: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """A budget. Peaks are measured, except `predicted_bytes`.

    next_budget_bytes: the smallest larger budget with which auto chooses another policy.
    best: the fastest hand-set policy that fits; "" if none does.
    ratio: the time of a step over that of `best`, the median over rounds; None without times.
    """

    budget_bytes: int
    policy: str
    predicted_bytes: int
    peak_bytes: int
    next_budget_bytes: int
    next_policy: str
    next_peak_bytes: int
    best: str = ""
    ratio: float | None = None


def run_of(machine: str, flags: str = FLAGS) -> Run:
    """Returns the run, without a policy, on this machine."""
    return Run(parse_args(flags.split()).config, load_hardware(machine), 1, Memo())


def limits(run: Run) -> Limits:
    """Returns the peaks between which auto has a choice."""
    found = fitted(run, 1)
    assert isinstance(found, Unreachable)
    return Limits(found.smallest.peak.num_bytes, run.peak(with_policy(run.config, None)).num_bytes)


def budgets(run: Run, number: int) -> list[int]:
    """Returns budgets in equal steps strictly between the limits."""
    least, most = limits(run)
    return [least + (most - least) * (2 * step + 1) // (2 * number) for step in range(number)]


def chosen(run: Run, budget_bytes: int) -> Chosen:
    """Returns the run with the policy that auto chooses. The budget must be reachable."""
    found = fitted(run, budget_bytes)
    assert isinstance(found, Chosen), budget_bytes
    return found


def next_budget(run: Run, budget_bytes: int) -> int:
    """Returns the smallest larger budget with which auto chooses another policy, by bisection."""
    policy = policy_of(chosen(run, budget_bytes).config)
    low, high = budget_bytes, limits(run).most
    while high - low > 1:
        middle = (low + high) // 2
        if policy_of(chosen(run, middle).config) == policy:
            low = middle
        else:
            high = middle
    return high


def policy_of(config: RunConfig) -> str:
    """Returns the text of the run's policy."""
    return str(config.recompute.policy)


@lru_cache
def measured_peak(config: RunConfig) -> int:
    """Returns the bytes that a step allocates at most."""
    return int(run_ranks(_peak, 1, config, detail=False)[0])


def _peak(rank: int, world_size: int, config: RunConfig) -> int:
    with parallel_state(config.parallel, seed=config.training.seed) as parallel:
        return measure(config, parallel, num_microbatches=NUM_MICROBATCHES).num_bytes


def memory_row(run: Run, budget_bytes: int) -> Row:
    """Returns the row of a budget, without times."""
    own, larger = chosen(run, budget_bytes), next_budget(run, budget_bytes)
    following = chosen(run, larger)
    return Row(
        budget_bytes=budget_bytes,
        policy=policy_of(own.config),
        predicted_bytes=own.peak.num_bytes,
        peak_bytes=measured_peak(own.config),
        next_budget_bytes=larger,
        next_policy=policy_of(following.config),
        next_peak_bytes=measured_peak(following.config),
    )


def hand_set_peaks(run: Run) -> dict[str, int]:
    """Returns the measured peak of each hand-set policy."""
    return {text: measured_peak(with_policy(run.config, text)) for text in HAND_SET}


def step_times(run: Run, policies: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of processor time of one step under each policy, round by round."""
    return dict(run_ranks(_times, 1, run.config, policies, rounds, detail=False)[0])


def _times(
    rank: int, world_size: int, config: RunConfig, policies: Sequence[str], rounds: int
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {text: [] for text in policies}
    with parallel_state(config.parallel, seed=config.training.seed) as parallel:
        steps = {text: _step(with_policy(config, text), parallel) for text in policies}
        for step in steps.values():
            step()
        for number in range(rounds):
            # Each round begins with another policy.
            for text in (*policies[number % len(policies) :], *policies[: number % len(policies)]):
                begin = time.process_time()
                steps[text]()
                found[text].append(time.process_time() - begin)
    return found


def _step(config: RunConfig, parallel: ParallelState) -> Callable[[], object]:
    """Returns a function that trains one step."""
    model = build_stages(config, parallel)
    optimizer = Optimizer(model, config.optimizer, parallel, config.data_parallel)
    fuse_weight_gradients_(config.training, parallel, model, optimizer)
    batches = MicroBatches(
        dataset=samples(config),
        consumed_samples=0,
        micro_batch_size=config.training.micro_batch_size,
        num_microbatches=NUM_MICROBATCHES,
        parallel=parallel,
    )
    runner = StageRunner.of(config, model, parallel)
    return partial(train_step, runner, optimizer, batches, learning_rate=LEARNING_RATE)


def with_times(
    own: Sequence[Row], peaks: dict[str, int], times: dict[str, list[float]]
) -> Iterator[Row]:
    """Yields the rows with their times.

    peaks: those of the hand-set policies. times: those of every policy, round by round.
    """
    for row in own:
        fits = [text for text, peak in peaks.items() if peak <= row.budget_bytes]
        if not fits:
            yield row
            continue
        best = min(fits, key=lambda text: statistics.median(times[text]))
        ratios = [
            ours / theirs for ours, theirs in zip(times[row.policy], times[best], strict=True)
        ]
        yield Row(**{**asdict(row), "best": best, "ratio": statistics.median(ratios)})


def line(row: Row) -> str:
    """Returns the line of a row."""
    ratio = "none fits" if row.ratio is None else f"{row.ratio:.3f} of {row.best}"
    kept = "yes" if row.peak_bytes <= row.budget_bytes < row.next_peak_bytes else "NO"
    return (
        f"{row.budget_bytes / MIB:9.3f}{row.peak_bytes / MIB:9.3f}{row.next_peak_bytes / MIB:9.3f}"
        f"{kept:>6}  {ratio:32} {row.policy}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table. Returns 0 if every budget keeps both properties of memory, else 1."""
    parser = argparse.ArgumentParser(
        prog="budgets.py", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--budgets", type=int, default=6, help="how many budgets")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each policy")
    parser.add_argument("--machine", default="cpu", help="a name, or a file of tools/calibrate.py")
    parser.add_argument("--json", metavar="FILE", help="also write settings and rows")
    args = parser.parse_args(argv)
    if args.budgets < 1 or args.rounds < 1:
        parser.error("--budgets and --rounds must be at least 1")
    run = run_of(args.machine)
    print(FLAGS, "", sep="\n")
    own = [memory_row(run, budget) for budget in budgets(run, args.budgets)]
    peaks = hand_set_peaks(run)
    policies = list(dict.fromkeys((*HAND_SET, *(row.policy for row in own))))
    times = step_times(run, policies, args.rounds)
    found = list(with_times(own, peaks, times))
    print(f"{'budget':>9}{'peak':>9}{'next':>9}{'':>6}  {'time / best by hand':32} policy of auto")
    print("\n".join(map(line, found)))
    if args.json:
        report = {
            "flags": FLAGS,
            "machine": args.machine,
            "rounds": args.rounds,
            "hand_set_peak_bytes": peaks,
            "step_seconds": times,
            "rows": [asdict(row) for row in found],
        }
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return int(any(not row.peak_bytes <= row.budget_bytes < row.next_peak_bytes for row in found))


if __name__ == "__main__":
    sys.exit(main())
