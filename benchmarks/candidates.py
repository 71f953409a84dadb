"""Times changes of the training step, each one against the code without it.

    candidate | predicted | saved per step | share of the step | kept?

The two sides of a candidate take turns in one process, on one thread, on tensors of the shape
"medium" in float32. Clock: processor time, which other programs hardly disturb. The share is the
saved time over the time of a whole step, measured in the same process. With --vocabulary the
candidates are those of a large vocabulary, in a shape of their own. docs/performance.md has the
tables.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.candidate_sides import (
    attention_in_blocks,
    bf16_attention,
    bias_gradients,
    clipping_in_update,
    contiguous_heads,
    embedding_gradient,
    gelu_backward,
    gradient_in_parts,
    loss_in_one_pass,
    products_by_onednn,
    residual_and_norm,
    split_heads,
    weight_gradients,
)
from benchmarks.engines import PRESETS, Setting, Shape, our_step
from benchmarks.harness import Clock, device_name
from benchmarks.page_part import publish

BEGIN, END = "<!-- candidates -->\n", "<!-- /candidates -->"
OTHER_MARKS = "<!-- candidates of a vocabulary -->\n", "<!-- /candidates of a vocabulary -->"


class Candidate(NamedTuple):
    """A change of the step.

    predicted: the expected gain, as a share of the step.
    sides: builds the code without the change and the code with it.
    per_layer: whether it runs in each layer, or once in a step.
    kept: whether the step has the change.
    dtype: of the step.
    """

    name: str
    predicted: str
    sides: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]
    per_layer: bool
    kept: str
    dtype: str = "float32"


CANDIDATES = (
    Candidate(
        "weight gradients by `addmm` into the gradient buffer, against a product and a copy",
        "1 to 3 %, and no tensor of the gradient",
        weight_gradients,
        True,
        "yes",
    ),
    Candidate(
        "large products by oneDNN on AMD processors with AVX-512, here those of `linear_fc1`",
        "10 %",
        products_by_onednn,
        True,
        "yes",
    ),
    Candidate(
        "one gradient of query, key and value, against three tensors of zeros and two sums",
        "1.5 %",
        split_heads,
        True,
        "yes",
    ),
    Candidate(
        "causal attention in blocks of 128 queries, 512 tokens",
        "3 %",
        lambda: attention_in_blocks(512, 4),
        True,
        "yes",
    ),
    Candidate("the same, 256 tokens", "1 %", lambda: attention_in_blocks(256, 8), True, "yes"),
    Candidate(
        "the same, 1,024 tokens",
        "1 %",
        lambda: attention_in_blocks(1024, 2),
        True,
        "no: the kernel skips half of the later keys by itself",
    ),
    Candidate(
        "bf16 attention by products on processors with avx512_bf16 and without AMX, 512 tokens",
        "14 % of a bf16 step",
        lambda: bf16_attention(512, 4),
        True,
        "yes",
        dtype="bf16",
    ),
    Candidate(
        "the same, 2,048 tokens", "2 %", lambda: bf16_attention(2048, 1), True, "yes", dtype="bf16"
    ),
    Candidate(
        "attention on contiguous copies of the heads, [b, a, s, d]",
        "1 %",
        contiguous_heads,
        True,
        "no: within the noise from run to run",
    ),
    Candidate(
        "gelu's backward by a sigmoid, 64 Ki elements at a time",
        "1.5 %",
        gelu_backward,
        True,
        "no: torch's kernel is at least as fast",
    ),
    Candidate(
        "bias gradients by a matmul with ones",
        "0.3 %",
        bias_gradients,
        True,
        "no: it changes the order of the sum for little",
    ),
    Candidate(
        "residual sum, dropout and norm, 64 tokens at a time in the cache",
        "1 %",
        residual_and_norm,
        True,
        "no: the calls cost more than the cache saves",
    ),
    Candidate(
        "embedding gradient added into the buffer, without a dense tensor",
        "0.3 %",
        embedding_gradient,
        False,
        "yes",
    ),
    Candidate(
        "loss and both gradients of the head in one pass over chunks of 512 tokens",
        "0.5 %, and 44 MiB less at the peak",
        loss_in_one_pass,
        False,
        "yes, in float32 runs",
    ),
)

VOCABULARY = Shape(
    num_layers=12,
    hidden_size=768,
    num_attention_heads=12,
    seq_length=256,
    batch_size=1,
    vocab_size=50304,
)
OF_VOCABULARY = (
    *(
        Candidate(
            f"{words} embedding gradient added into the buffer, without a dense tensor",
            "2 %",
            partial(embedding_gradient, VOCABULARY, dtype),
            False,
            "yes",
            name,
        )
        for words, name, dtype in (
            ("float32", "float32", torch.float32),
            ("bf16", "bf16", torch.bfloat16),
        )
    ),
    Candidate(
        "bf16 gradient of the output projection in parts of 8 MiB",
        "1 %, and no tensor of the gradient",
        partial(gradient_in_parts, VOCABULARY),
        False,
        "yes, for its memory",
        "bf16",
    ),
    Candidate(
        "clipping inside torch's fused AdamW, which divides by a factor",
        "2 %",
        partial(clipping_in_update, VOCABULARY),
        False,
        "no: every update rule would have to divide, for little",
    ),
)


class Row(NamedTuple):
    """A row of the table. ratio: the time with the change over the time without it."""

    name: str
    predicted: str
    without_ms: float
    with_ms: float
    ratio: float
    share: float
    kept: str


def measure(candidate: Candidate, step_ms: float, clock: Clock, *, rounds: int) -> Row:
    """Runs the two sides in turn, after one round that warms up. Each round gives one ratio."""
    sides = candidate.sides()
    for side in sides:
        side()
    samples = [[clock.ms(side) for side in sides] for _ in range(rounds)]
    without, changed = (statistics.median(times) for times in zip(*samples, strict=True))
    ratio = statistics.median(new / old for old, new in samples)
    times = PRESETS["medium"].num_layers if candidate.per_layer else 1
    share = (1.0 - ratio) * without * times / step_ms
    return Row(candidate.name, candidate.predicted, without, changed, ratio, share, candidate.kept)


def measure_step(shape: Shape, dtype: str, clock: Clock, *, rounds: int) -> float:
    """Returns the milliseconds of our step of this shape in this dtype."""
    setting = Setting(shape=shape, device=clock.device, dtype=dtype, dropout=0.0)
    step = our_step(setting, setting.batch())
    step()
    return statistics.median(clock.ms(step) for _ in range(rounds))


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| candidate | predicted | without, ms | with, ms | ratio | share of the step | kept? |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.predicted} | {row.without_ms:.2f} | {row.with_ms:.2f} "
        f"| {row.ratio:.2f} | {row.share:+.1%} | {row.kept} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def part_of(report: Mapping[str, Any]) -> str:
    """Returns what a page has of a report: the machine, the step and the table."""
    times = " and ".join(f"{ms:.0f} ms in {dtype}" for dtype, ms in report["step_ms"].items())
    heading = f"{report['device']}, 1 thread, torch {report['torch']}; a step takes {times}"
    return f"{heading}.\n\n{table([Row(**row) for row in report['rows']])}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only candidates with this text in their names")
    parser.add_argument("--repeats", type=int, default=15, help="rounds; default: 15")
    parser.add_argument(
        "--vocabulary", action="store_true", help="those of a large vocabulary, in a small batch"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows")
    parser.add_argument("--output", metavar="PAGE", help="a page with the marks of the table")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    clock = Clock(device=device, kind="cpu")
    shape, every = PRESETS["medium"], CANDIDATES
    if args.vocabulary:
        shape, every = VOCABULARY, OF_VOCABULARY
    chosen = [candidate for candidate in every if args.only in candidate.name]
    step_ms = {
        dtype: measure_step(shape, dtype, clock, rounds=max(1, args.repeats // 5))
        for dtype in dict.fromkeys(candidate.dtype for candidate in chosen)
    }
    rows = [
        measure(candidate, step_ms[candidate.dtype], clock, rounds=args.repeats)
        for candidate in chosen
    ]
    report = {
        "device": device_name(device),
        "torch": torch.__version__,
        "step_ms": step_ms,
        "rounds": args.repeats,
        "rows": [row._asdict() for row in rows],
    }
    print(part_of(report))
    publish(args, parser, report, OTHER_MARKS if args.vocabulary else (BEGIN, END), part_of(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
