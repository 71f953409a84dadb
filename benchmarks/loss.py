"""Times output projection and cross-entropy, forward and backward, and counts their bytes.

    kept            ours without --loss-chunk-size: all logits, which backward reads again
    chunks of N     ours with --loss-chunk-size N: logits of N tokens at a time, which backward
                    computes a second time
    torch, plain    F.cross_entropy(F.linear(..))
    torch, fused    F.linear_cross_entropy with its own choice of chunks, if torch has it. Its
                    forward computes the gradients, so all tokens must share one incoming gradient,
                    and it works for one rank only.

They take turns, A B C A B C .., and each round gives one ratio. The benchmark runs in one process
on one device, with random operands.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import DTYPES, SEED
from benchmarks.harness import Clock, add_clock_arguments, device_name, spread, write_report
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.tensor_parallel.column_linear import column_parallel_linear
from megatron_lite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_lite.tensor_parallel.linear_cross_entropy import vocab_parallel_linear_cross_entropy

KEPT = "kept"
# hidden states [s, 1, h], weight [V, h], labels [s, 1] -> the mean
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def kept(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Returns our loss, which keeps all logits."""
    logits = column_parallel_linear(
        hidden_states, weight, None, tp_group=None, sequence_parallel=False
    )
    return vocab_parallel_cross_entropy(
        logits, labels, tp_group=None, first_id=0, num_ids=len(weight)
    ).mean()


def in_chunks(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, *, loss_chunk_size: int
) -> Tensor:
    """Returns our loss, computed from the logits of `loss_chunk_size` tokens at a time."""
    return vocab_parallel_linear_cross_entropy(
        hidden_states,
        weight,
        labels,
        loss_chunk_size=loss_chunk_size,
        tp_group=None,
        sequence_parallel=False,
        first_id=0,
        num_ids=len(weight),
    ).mean()


def plain(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Returns torch's loss, which keeps all logits."""
    return F.cross_entropy(F.linear(hidden_states, weight).flatten(0, 1), labels.flatten())


def fused(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Returns torch's fused loss, computed in chunks of its own choice."""
    return F.linear_cross_entropy(
        hidden_states.flatten(0, 1),
        weight,
        labels.flatten(),
        options=nn.LinearCrossEntropyOptions(),
    )


def engines(chunk_sizes: Sequence[int]) -> dict[str, Loss]:
    """Returns the loss of every row by name, KEPT first."""
    ours = {f"chunks of {size}": partial(in_chunks, loss_chunk_size=size) for size in chunk_sizes}
    return {
        KEPT: kept,
        **ours,
        "torch, plain": plain,
        **({"torch, fused": fused} if hasattr(F, "linear_cross_entropy") else {}),
    }


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table.

    time_ratio: the time over that of `kept`, as (median, least, most) of the rounds.
    kept_bytes: the bytes alive after forward, without the operands.
    peak_bytes: the most bytes alive in forward and backward, without the operands.
    logits_bytes: the bytes of all logits.
    """

    engine: str
    dtype: str
    hidden_size: int
    vocab_size: int
    ms: float
    time_ratio: tuple[float, float, float]
    kept_bytes: int
    peak_bytes: int
    logits_bytes: int
    loss: float
    samples_ms: list[float]


def measure(args: argparse.Namespace, dtype: str, hidden_size: int, vocab_size: int) -> list[Row]:
    """Returns the rows of one block."""
    generator = torch.Generator().manual_seed(SEED)
    place = dict(device=args.device, dtype=DTYPES[dtype])
    hidden_states = (
        torch.randn(args.tokens, 1, hidden_size, generator=generator).to(**place).requires_grad_()
    )
    weight = (
        torch.randn(vocab_size, hidden_size, generator=generator)
        .mul_(0.02)
        .to(**place)
        .requires_grad_()
    )
    labels = torch.randint(vocab_size, (args.tokens, 1), generator=generator).to(args.device)

    def step(loss_fn: Loss) -> Tensor:
        hidden_states.grad = weight.grad = None
        loss = loss_fn(hidden_states, weight, labels)
        loss.backward()
        return loss.detach()

    table = engines(args.chunk_size)
    losses = {name: step(loss_fn).item() for name, loss_fn in table.items()}
    kept_bytes, peak_bytes = {}, {}
    for name, loss_fn in table.items():
        hidden_states.grad = weight.grad = None
        with LiveStorages() as live:
            loss = loss_fn(hidden_states, weight, labels)
            kept_bytes[name] = live.total_bytes()
            loss.backward()
        peak_bytes[name] = live.peak_bytes
    clock = Clock(device=args.device, kind=args.clock, steps=5 if args.device.type == "cuda" else 1)
    samples: dict[str, list[float]] = {name: [] for name in table}
    for number, (name, loss_fn) in itertools.product(range(args.repeats + 1), table.items()):
        ms = clock.ms(partial(step, loss_fn))
        if number:  # the first round warms up
            samples[name].append(ms)
    rows = []
    for name, times in samples.items():
        rows.append(
            Row(
                engine=name,
                dtype=dtype,
                hidden_size=hidden_size,
                vocab_size=vocab_size,
                ms=statistics.median(times),
                time_ratio=spread(times, samples[KEPT]),
                kept_bytes=kept_bytes[name],
                peak_bytes=peak_bytes[name],
                logits_bytes=args.tokens * vocab_size * DTYPES[dtype].itemsize,
                loss=losses[name],
                samples_ms=times,
            )
        )
    return rows


def line(row: Row) -> str:
    """Returns one line of the table."""
    middle, low, high = row.time_ratio
    ratio = "" if row.engine == KEPT else f"{middle:.2f} ({low:.2f}-{high:.2f})"
    kept_mib, peak_mib = row.kept_bytes / 2**20, row.peak_bytes / 2**20
    return (
        f"{row.dtype:8}{row.hidden_size:6}{row.vocab_size:8}  {row.engine:15}{row.ms:9.1f}  "
        f"{ratio:17}"
        f"{kept_mib:9.1f}{peak_mib:9.1f}{row.peak_bytes / row.logits_bytes:10.2f}{row.loss:10.4f}"
    )


HEADER = (
    f"{'dtype':8}{'h':>6}{'V':>8}  {'':15}{'ms':>9}  "
    f"{'time / kept':17}{'kept MiB':>9}{'peak MiB':>9}{'/ logits':>10}{'loss':>10}"
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="loss.py", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ..; default: cuda where there is one"
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="default: both"
    )
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="s b; default: 2048")
    parser.add_argument(
        "--hidden-size",
        type=int,
        nargs="+",
        default=[256, 512],
        metavar="N",
        help="default: 256 512",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        nargs="+",
        default=[8192, 32768],
        metavar="N",
        help="default: 8192 32768",
    )
    parser.add_argument(
        "--chunk-size",
        type=int,
        nargs="+",
        default=[128, 256, 512, 1024],
        metavar="N",
        help="default: 128 256 512 1024",
    )
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="rounds; default: 7")
    add_clock_arguments(parser)
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.device = torch.device(args.device)
    if args.clock == "cpu" and (args.threads != 1 or args.device.type != "cpu"):
        parser.error(
            "--clock cpu reads one thread's processor time: it needs --threads 1 and --device cpu"
        )
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0."""
    args = parse(argv)
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(args.device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "clock": args.clock,
        "rounds": args.repeats,
        "tokens": args.tokens,
        "rows": [],
    }
    print(
        f"{report['device']}, {report['threads']} CPU thread(s), torch {torch.__version__}, "
        f"{args.clock} time, medians of {args.repeats} rounds (least-most), {args.tokens} tokens\n"
        f"{HEADER}",
        flush=True,
    )
    for dtype, hidden_size, vocab_size in itertools.product(
        args.dtype, args.hidden_size, args.vocab_size
    ):
        rows = measure(args, dtype, hidden_size, vocab_size)
        print(*map(line, rows), sep="\n", flush=True)
        report["rows"] += map(asdict, rows)
        write_report(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
