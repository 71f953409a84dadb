"""Fails if a training step has become much slower, or larger, than plain PyTorch: minutes, any CPU.

Every figure is a ratio of two contestants of one run (benchmarks/side_by_side_engines.py). A time
is the least processor time of all rounds, which other programs on the machine hardly change. More
rounds run while a ratio is above its limit, so a disturbed round cannot fail the check.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import PRESETS, Setting, one_rank
from benchmarks.harness import garbage_kept
from benchmarks.recompute_engines import Place
from benchmarks.side_by_side_block import facts
from benchmarks.side_by_side_engines import OURS, build_contestants

PLAIN = "plain torch, none"
# The figure of the first over that of the second must not be above the limit. The times were 0.95,
# 1.27 and 1.07 on an AMD EPYC when the limits were chosen, and the peaks 0.74, 0.29 and 0.71.
TIME_LIMITS = {(OURS, PLAIN): 1.5, ("ours, full", OURS): 1.9, ("ours, pointwise", OURS): 1.6}
PEAK_LIMITS = {(OURS, PLAIN): 1.25, ("ours, full", OURS): 0.8, ("ours, pointwise", OURS): 0.95}
ROUNDS, MOST_ROUNDS, SECONDS = 5, 25, 90.0


def main() -> int:
    """Returns 0, or 1 if a ratio is above its limit."""
    torch.set_num_threads(1)
    setting = Setting(
        shape=PRESETS["small"], device=torch.device("cpu"), dtype="float32", dropout=0.0
    )
    parallel = one_rank(setting)
    place = Place(parallel=parallel, sequence_parallel=False)
    found, _ = build_contestants("gpt", setting, place, compiled=False, peers=["plain"])
    names = {name for pair in TIME_LIMITS for name in pair}
    contestants = [one for one in found if one.name in names]
    least = {one.name: float("inf") for one in contestants}
    began = time.monotonic()
    with garbage_kept():
        figures = {one.name: facts(one, parallel.rng) for one in contestants}
        for number in range(MOST_ROUNDS):
            for one in contestants:
                one.clear()
                start = time.process_time()
                one.run()
                least[one.name] = min(least[one.name], time.process_time() - start)
            late = time.monotonic() - began > SECONDS
            if late or (number + 1 >= ROUNDS and not above(least, TIME_LIMITS)):
                break
    peaks = {name: float(own["peak_bytes"]) for name, own in figures.items()}
    for what, values, limits in (("time", least, TIME_LIMITS), ("peak", peaks, PEAK_LIMITS)):
        for (name, other), limit in limits.items():
            ratio = values[name] / values[other]
            print(f"{what} of {name} / {other}: {ratio:.2f} (limit {limit})")
    losses = {own["loss"] for own in figures.values()}
    if max(losses) - min(losses) > 1e-3:
        print(f"the contestants compute different losses: {sorted(losses)}", file=sys.stderr)
        return 1
    too_large = above(least, TIME_LIMITS) + above(peaks, PEAK_LIMITS)
    for name, other in too_large:
        print(f"smoke: {name} is above its limit relative to {other}", file=sys.stderr)
    return 1 if too_large else 0


def above(values: dict[str, float], limits: dict[tuple[str, str], float]) -> list[tuple[str, str]]:
    return [pair for pair, limit in limits.items() if values[pair[0]] > limit * values[pair[1]]]


if __name__ == "__main__":
    sys.exit(main())
