"""Compares three ways to compute output projection and loss: their time, and the peak of a step.

    whole logits    without --loss-chunk-size: all logits exist, and backward reads them again
    two passes      --loss-chunk-size N, where backward computes the logits of a chunk again
    one pass        --loss-chunk-size N in float32: forward computes both gradients of a chunk

The time is that of the head alone: forward, backward and the addition of the weight's gradient to
the gradient buffer. The three take turns in one process, on one thread; each round gives one ratio.
The peak is that of a whole step that recomputes nothing, as torch's allocator counts it. The shape
is "medium" in float32. docs/performance.md has the table of one run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import PropertyMock, patch

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from arguments import parse_args
from benchmarks.engines import PRESETS, SEED
from benchmarks.harness import Clock, device_name, spread
from benchmarks.page_part import publish
from benchmarks.step_peaks import measure
from megatron_lite.config.run import RunConfig
from megatron_lite.memory.predict.step_peak import step_peak
from megatron_lite.parallel.state import parallel_state
from megatron_lite.parallel.weight_gradient import accumulate_with_
from megatron_lite.tensor_parallel.column_linear import column_parallel_linear
from megatron_lite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_lite.tensor_parallel.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from megatron_lite.training.processor import multiplies_faster_by_onednn

BEGIN, END = "<!-- loss step -->\n", "<!-- /loss step -->"
WHOLE, TWO_PASSES, ONE_PASS = "whole logits", "two passes", "one pass"
MIB = 2.0**20


class Row(NamedTuple):
    """A row of the table.

    ms: the median time of the head. ratio: the time over that of the whole logits, as (median,
    least, most) of the rounds. peak_mib: the measured peak of a step. predicted_mib: the predicted
    one.
    """

    name: str
    ms: float
    ratio: tuple[float, float, float]
    peak_mib: float
    predicted_mib: float


class Head:
    """A random output projection of the given sizes, whose gradient has a buffer.

    Each of the methods runs a forward and a backward, and returns the losses.
    onednn: whether oneDNN computes large products, as in a run on the processors that gain from it.
    """

    def __init__(
        self,
        tokens: int,
        hidden_size: int,
        vocab_size: int,
        chunk_size: int,
        *,
        onednn: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.hidden = torch.randn(tokens, 1, hidden_size, generator=generator).requires_grad_()
        weight = torch.randn(vocab_size, hidden_size, generator=generator).mul_(0.02)
        self.weight, self.total = nn.Parameter(weight), torch.zeros_like(weight)
        self.labels = torch.randint(vocab_size, (tokens, 1), generator=generator)
        self._chunk_size, self._onednn = chunk_size, onednn
        accumulate_with_(None, [(self.weight, self.total)])

    def whole_logits(self) -> Tensor:
        """All logits exist and are kept."""
        logits = column_parallel_linear(
            self.hidden,
            self.weight,
            None,
            tp_group=None,
            sequence_parallel=False,
            onednn=self._onednn,
        )
        return self._backward(
            vocab_parallel_cross_entropy(
                logits,
                self.labels,
                tp_group=None,
                first_id=0,
                num_ids=len(self.weight),
                overwrite_logits=True,
            )
        )

    def two_passes(self) -> Tensor:
        """Backward computes the logits of each chunk again."""
        return self._backward(self._in_chunks(None))

    def one_pass(self) -> Tensor:
        """Forward computes the gradients of each chunk."""
        gradient = torch.full((), 1.0 / self.labels.numel()).expand(self.labels.shape)
        return self._backward(self._in_chunks(lambda: gradient))

    def _in_chunks(self, grad_losses: Callable[[], Tensor] | None) -> Tensor:
        return vocab_parallel_linear_cross_entropy(
            self.hidden,
            self.weight,
            self.labels,
            loss_chunk_size=self._chunk_size,
            tp_group=None,
            sequence_parallel=False,
            first_id=0,
            num_ids=len(self.weight),
            grad_losses=grad_losses,
            onednn=self._onednn,
        )

    def _backward(self, losses: Tensor) -> Tensor:
        losses.mean().backward()
        self.hidden.grad = self.weight.grad = None
        return losses.detach()


def flags(args: argparse.Namespace) -> str:
    """Returns the flags of the run of which the peak is measured."""
    shape = PRESETS["medium"]
    return (
        f"--num-layers {args.num_layers} --hidden-size {args.hidden_size} "
        f"--num-attention-heads {shape.num_attention_heads} --seq-length {args.seq_length} "
        f"--max-position-embeddings {args.seq_length} --micro-batch-size {args.batch_size} "
        f"--vocab-size {args.vocab_size - 1} --make-vocab-size-divisible-by 64 "
        "--hidden-dropout 0 --attention-dropout 0 --mock-data --lr 1e-3 --train-iters 2 "
        f"--distributed-backend gloo --global-batch-size {2 * args.batch_size}"
    )


@contextmanager
def passes(name: str) -> Iterator[None]:
    """Makes a loss in chunks take two passes, if the row says so."""
    if name != TWO_PASSES:
        yield
        return
    with patch.object(RunConfig, "loss_in_one_pass", new=PropertyMock(return_value=False)):
        yield


def peaks(args: argparse.Namespace, name: str) -> tuple[float, float]:
    """Returns the measured and the predicted peak of a step of two micro-batches, in MiB."""
    chunk_size = 0 if name == WHOLE else args.chunk_size
    config = parse_args(f"{flags(args)} --loss-chunk-size {chunk_size}".split()).config
    with passes(name), parallel_state(config.parallel, seed=SEED) as parallel:
        measured = measure(config, parallel, num_microbatches=2).num_bytes
        predicted = step_peak(config, 0, device="cpu", dp_cp_size=1, num_microbatches=2).num_bytes
    return measured / MIB, predicted / MIB


def rows(args: argparse.Namespace) -> list[Row]:
    """Runs the three ways in turn, after one round that warms up."""
    head = Head(
        args.seq_length * args.batch_size,
        args.hidden_size,
        args.vocab_size,
        args.chunk_size,
        onednn=multiplies_faster_by_onednn(),
    )
    sides = {WHOLE: head.whole_logits, TWO_PASSES: head.two_passes, ONE_PASS: head.one_pass}
    clock = Clock(device=torch.device("cpu"), kind="cpu")
    for side in sides.values():
        side()
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, side in sides.items():
            samples[name].append(clock.ms(side))
    del head, sides
    return [
        Row(name, statistics.median(times), spread(times, samples[WHOLE]), *peaks(args, name))
        for name, times in samples.items()
    ]


def table(found: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| output projection and loss | time, ms | over whole logits (least-most) "
        "| peak of a step, MiB | predicted, MiB |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        middle, least, most = row.ratio
        lines.append(
            f"| {row.name} | {row.ms:.0f} | {middle:.2f} ({least:.2f}-{most:.2f}) "
            f"| {row.peak_mib:.1f} | {row.predicted_mib:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table. Returns 0."""
    shape = PRESETS["medium"]
    parser = argparse.ArgumentParser(
        prog="loss_step.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    number = partial(parser.add_argument, type=int, metavar="N")
    number("--num-layers", default=shape.num_layers, help="layers; default: %(default)s")
    number("--hidden-size", default=shape.hidden_size, help="default: %(default)s")
    number("--seq-length", default=shape.seq_length, help="default: %(default)s")
    number("--batch-size", default=shape.batch_size, help="samples; default: %(default)s")
    number("--vocab-size", default=shape.vocab_size, help="default: %(default)s")
    number("--chunk-size", default=512, help="tokens of a chunk; default: %(default)s")
    number("--repeats", default=15, help="rounds; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="also write the rows")
    parser.add_argument("--output", metavar="PAGE", help="a page with the marks of the table")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = rows(args)
    library = "oneDNN" if multiplies_faster_by_onednn() else "torch's BLAS library"
    heading = (
        f"{device_name(torch.device('cpu'))}, 1 thread, torch {torch.__version__}, products by "
        f"{library}, chunks of {args.chunk_size} tokens, medians of {args.repeats} rounds"
    )
    print(heading, table(found), sep="\n\n")
    report = {
        "device": device_name(torch.device("cpu")),
        "torch": torch.__version__,
        "rounds": args.repeats,
        "chunk_size": args.chunk_size,
        "rows": [row._asdict() for row in found],
    }
    publish(args, parser, report, (BEGIN, END), f"{heading}.\n\n{table(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
