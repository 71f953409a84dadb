"""Fails if a training step has become slower, or larger, than plain PyTorch: minutes, any CPU.

Plain PyTorch is a GPT of nn.Linear, nn.LayerNorm, F.gelu, scaled_dot_product_attention and
F.cross_entropy under autograd, of the same shape and with the same weights: float32, one thread,
forward and backward, no dropout. A step without recomputation takes at most 1.05 of its time.

An attempt is a few rounds in which every contestant has its turn. Its ratio is the median of the
ratios of its rounds, in processor time, which other programs on the machine hardly change. The best
attempt counts: other work can only spoil an attempt. The check fails if every attempt is more than
MARGIN above its limit.
"""

import math
import sys
import time
from functools import partial

import torch

from benchmarks.contestants import OURS, PLAIN, build_contestants
from benchmarks.engines import PRESETS, Setting
from benchmarks.harness import in_rounds, peak_above, spread, timed

# The figure of the first over that of the second must not be above the limits of time and peak. The
# peaks were 0.74, 0.29 and 0.71 when the limits were chosen.
LIMITS = {
    (OURS, PLAIN): (1.05, 1.25),
    ("ours, full", OURS): (1.45, 0.8),
    ("ours, pointwise", OURS): (1.25, 0.95),
}
MARGIN = 0.05  # between two runs of one attempt on a shared machine
ROUNDS, ATTEMPTS, SECONDS = 5, 8, 75.0


def main():
    """Returns 0, or 1 if a ratio is above its limit."""
    torch.set_num_threads(1)
    setting = Setting(
        shape=PRESETS["small"], device=torch.device("cpu"), dtype="float32", dropout=0.0
    )
    contestants = list(build_contestants(setting, {}, peers=["plain"]))
    losses = [one.run().item() for one in contestants]
    if max(losses) - min(losses) > 1e-3:
        print(f"the contestants compute different losses: {losses}", file=sys.stderr)
        return 1
    peaks = {one.name: peak_above(one.run, setting.device) for one in contestants}
    times, failed = best_attempts(contestants), False
    for (name, base), (most_time, most_bytes) in LIMITS.items():
        for what, ratio, limit, margin in (
            ("time", times[name, base], most_time, MARGIN),
            ("peak", peaks[name] / peaks[base], most_bytes, 0.0),
        ):
            verdict = "within" if ratio <= limit else "above, but by less than a machine's noise"
            if ratio > limit + margin:
                verdict, failed = "ABOVE", True
            print(f"{what} of {name} / {base}: {ratio:.3f}, limit {limit}: {verdict}")
    return int(failed)


def best_attempts(contestants):
    """Returns the least ratio of times of all attempts for each pair of LIMITS.

    An attempt is the median of the ratios over some rounds. None follows once every ratio is within
    its limit, or after SECONDS.
    """
    clock = partial(timed, device=torch.device("cpu"), kind="cpu")
    measured = {one.name: partial(one.ms, clock, one.run) for one in contestants}
    until, best = time.monotonic() + SECONDS, dict.fromkeys(LIMITS, math.inf)
    for _ in range(ATTEMPTS):
        times = in_rounds(measured, ROUNDS)
        best = {
            (name, base): min(ratio, spread(times[name], times[base])[0])
            for (name, base), ratio in best.items()
        }
        if all(best[pair] <= limit for pair, (limit, _) in LIMITS.items()):
            break
        if time.monotonic() > until:
            break
    return best


if __name__ == "__main__":
    sys.exit(main())
