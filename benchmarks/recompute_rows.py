"""The rows of the table of recomputation, and their text. See recompute.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.harness import Spread


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one engine. Bytes and FLOPs are those of rank 0.

    kept_ratio, extra_flops: relative to the same model without recomputation. transformers' engines
        are compared with transformers' model.
    time_ratio: its time over that of our `none`, over the rounds.
    rival: the policy of ours that keeps the same tensors, if the engine is not ours.
    rival_time_ratio: its time over that of `rival`. Above 1 ours is faster.
    """

    tp_size: int
    sequence_parallel: bool
    dtype: str
    dropout: float
    engine: str
    kept_bytes: int
    kept_ratio: float
    peak_bytes: int
    flops: int
    extra_flops: float
    ms: float
    time_ratio: Spread
    rival: str | None
    rival_time_ratio: Spread | None
    loss: float
    grad_norm: float
    samples_ms: list[float]


HEADER = (
    f"{'':31}{'kept':>8} {'of':>5}{'peak':>9}  {'time / none':17}{'FLOPs':>7}   {'its time /':17}\n"
    f"{'engine':31}{'MiB':>8} {'none':>5}{'MiB':>9}  {'(min-max)':17}{'':>7}   {'that of ours':17}"
)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of one block."""
    for row in rows:
        yield (
            f"{row.engine:31}{row.kept_bytes / 2**20:8.2f} "
            f"{row.kept_ratio:5.0%}{row.peak_bytes / 2**20:9.2f}  "
            f"{shown(row.time_ratio):17}{row.extra_flops:+7.1%}   {shown(row.rival_time_ratio):17}"
        ).rstrip()


def shown(ratio: Spread | None) -> str:
    """Returns the ratio in at most 16 columns, up to 999.

    A machine that does other work as well can show ratios of 10 and more. They have one digit less.
    """
    if ratio is None:
        return ""
    middle, low, high = (f"{one:.2f}" if one < 9.995 else f"{one:.3g}" for one in ratio)
    return f"{middle} ({low}-{high})"
