"""In which order a pipeline rank runs the forwards and backwards of a step: 1F1B and interleaved 1F1B, as plain lists.

    p = 2, m = 4      rank 0:  F0 F1 B0 F2 B1 F3 B2 B3          in flight: at most 2 micro-batches
                      rank 1:  F0 B0 F1 B1 F2 B2 F3 B3                     at most 1

Read alike by what runs it, what counts the bytes in flight and what draws it. Standard library only.
1F1B: PipeDream-Flush, 2006.09503; interleaved: section 2.2 of 2104.04473.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One micro-batch through one of the rank's stages. chunk: which of them. microbatch: its number in the step."""

    kind: Literal["forward", "backward"]
    microbatch: int
    chunk: int = 0


def order(*, size: int, rank: int, num_microbatches: int, chunks: int = 1) -> list[Action]:
    """What pipeline rank `rank` of `size` does in a step, with `chunks` stages on each rank.

    A few forwards to fill the pipeline, then a forward and a backward in turn, then the backwards that are left.
    ValueError: several stages on a rank, and micro-batches that are no multiple of the ranks.
    """
    forwards, backwards = _sequences(size, num_microbatches, chunks)
    warmup = min(warmup_forwards(size=size, rank=rank, chunks=chunks), len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup:]]


def warmup_forwards(*, size: int, rank: int, chunks: int = 1) -> int:
    """Forwards before the first pair of forward and backward, where there are micro-batches enough."""
    if chunks == 1:
        return size - rank - 1
    return 2 * (size - rank - 1) + (chunks - 1) * size


def forwards_only(*, size: int, num_microbatches: int, chunks: int = 1) -> list[Action]:
    """An evaluation: the same on every rank."""
    return _sequences(size, num_microbatches, chunks)[0]


def in_flight(actions: Sequence[Action]) -> Iterator[tuple[Action, list[Action]]]:
    """After each action: the forwards whose backward has not run, oldest first."""
    waiting: dict[Action, None] = {}
    for action in actions:
        if action.kind == "forward":
            waiting[action] = None
        else:
            del waiting[action._replace(kind="forward")]
        yield action, list(waiting)


def most_in_flight(*, size: int, rank: int, num_microbatches: int, chunks: int = 1) -> int:
    """The most forwards, each of one stage, that wait for their backward at once."""
    return min(warmup_forwards(size=size, rank=rank, chunks=chunks) + 1, num_microbatches * chunks)


def keeping_all(*, size: int, rank: int, num_microbatches: int, num_kept: int, chunks: int = 1) -> frozenset[Action]:
    """The forwards that keep everything, of a window of as many as can be in flight the first `num_kept`; the others follow the
    recompute policy. Later ranks have shorter windows. 2205.05198, appendix C."""
    window = most_in_flight(size=size, rank=rank, num_microbatches=num_microbatches, chunks=chunks)
    forwards = forwards_only(size=size, num_microbatches=num_microbatches, chunks=chunks)
    return frozenset(action for number, action in enumerate(forwards) if number % window < num_kept)


def bubble(*, size: int, num_microbatches: int, chunks: int = 1) -> float:
    """Idle time over busy time of a rank, where all stages take equally long: (p - 1) / (v m)."""
    return (size - 1) / (chunks * num_microbatches)


def check_num_microbatches(num_microbatches: int, *, size: int, chunks: int) -> None:
    """ValueError where the interleaved order needs other numbers."""
    if chunks > 1 and num_microbatches % size:
        raise ValueError(f"{num_microbatches} micro-batches per step are not a multiple of --pipeline-model-parallel-size {size}"
                         ", as several virtual stages per rank need: change --global-batch-size, or leave the virtual stages out")


def _sequences(size: int, num_microbatches: int, chunks: int) -> tuple[list[Action], list[Action]]:
    """All forwards and all backwards: `size` micro-batches through each stage of the rank in turn, then the next `size`."""
    check_num_microbatches(num_microbatches, size=size, chunks=chunks)
    group = size if chunks > 1 else 1
    forwards, backwards = [], []
    for first in range(0, num_microbatches, group):
        for chunk in range(chunks):
            for microbatch in range(first, min(first + group, num_microbatches)):
                forwards.append(Action("forward", microbatch, chunk))
                backwards.append(Action("backward", microbatch, chunks - 1 - chunk))
    return forwards, backwards
