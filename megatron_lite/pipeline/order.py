"""The order of the forwards and backwards that a pipeline rank runs in a step, as a plain list.

The order is 1F1B (PipeDream-Flush, 2006.09503) or interleaved 1F1B (section 2.2 of 2104.04473).

    p = 2, m = 4      rank 0:  F0 F1 B0 F2 B1 F3 B2 B3      at most 2 micro-batches in flight
                      rank 1:  F0 B0 F1 B1 F2 B2 F3 B3      at most 1

The trainer runs this list, and the memory model counts the kept bytes in flight from the same list.
This module uses the standard library only.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from megatron_lite.config.stages import most_in_flight


class Action(NamedTuple):
    """The forward or backward of one micro-batch through one of the rank's stages.

    microbatch: the micro-batch's number in the step.
    chunk: the stage's place among this rank's model chunks.
    """

    kind: Literal["forward", "backward"]
    microbatch: int
    chunk: int = 0


def order(*, size: int, rank: int, num_microbatches: int, num_chunks: int = 1) -> list[Action]:
    """Returns the actions of pipeline rank `rank` in a step, with `num_chunks` stages on each rank.

    The first forwards fill the pipeline. A forward and a backward follow in turn, and the remaining
    backwards come last. Raises ValueError if a rank has several stages and the number of
    micro-batches is not a multiple of the number of ranks.
    """
    forwards, backwards = _sequences(size, num_microbatches, num_chunks)
    # After the warm-up each forward is paired with a backward.
    warmup = -1 + most_in_flight(
        size=size, rank=rank, num_microbatches=num_microbatches, num_chunks=num_chunks
    )
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def forwards_only(*, size: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """Returns the forwards of an evaluation, in the same order on every rank."""
    return _sequences(size, num_microbatches, num_chunks)[0]


def in_flight(actions: Sequence[Action]) -> Iterator[tuple[Action, list[Action]]]:
    """Yields each action and the forwards whose backward has not run after it, oldest first."""
    waiting: dict[Action, None] = {}
    for action in actions:
        if action.kind == "forward":
            waiting[action] = None
        else:
            del waiting[action._replace(kind="forward")]
        yield action, list(waiting)


def keeping_all(
    *, size: int, rank: int, num_microbatches: int, num_kept: int, num_chunks: int = 1
) -> frozenset[Action]:
    """Returns the forwards that save all activations (2205.05198, appendix C).

    The forwards are grouped into windows as long as the number in flight on this rank. The first
    `num_kept` of each window save everything; the others follow the recompute policy. Later ranks
    have shorter windows.
    """
    window = most_in_flight(
        size=size, rank=rank, num_microbatches=num_microbatches, num_chunks=num_chunks
    )
    forwards = forwards_only(size=size, num_microbatches=num_microbatches, num_chunks=num_chunks)
    return frozenset(action for number, action in enumerate(forwards) if number % window < num_kept)


def _sequences(
    size: int, num_microbatches: int, num_chunks: int
) -> tuple[list[Action], list[Action]]:
    """Returns all forwards and all backwards, each in the order in which they run.

    With several stages per rank, `size` micro-batches run through each stage in turn, and the next
    `size` follow. Backwards take the stages in reverse.
    """
    if num_chunks > 1 and num_microbatches % size:
        raise ValueError(
            f"{num_microbatches} micro-batches per step are not a multiple of "
            f"--pipeline-model-parallel-size {size}, as several virtual stages per rank need: "
            "change --global-batch-size, or leave the virtual stages out"
        )
    group = size if num_chunks > 1 else 1
    forwards, backwards = [], []
    for first in range(0, num_microbatches, group):
        for chunk in range(num_chunks):
            for microbatch in range(first, min(first + group, num_microbatches)):
                forwards.append(Action("forward", microbatch, chunk))
                backwards.append(Action("backward", microbatch, num_chunks - 1 - chunk))
    return forwards, backwards
