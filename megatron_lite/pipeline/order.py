"""The order of the forwards and backwards that a pipeline rank runs in a step, as a plain list.

The order is 1F1B (PipeDream-Flush, 2006.09503) or interleaved 1F1B (section 2.2 of 2104.04473).

    p = 2, m = 4      rank 0:  F0 F1 B0 F2 B1 F3 B2 B3      at most 2 micro-batches in flight
                      rank 1:  F0 B0 F1 B1 F2 B2 F3 B3      at most 1

The trainer runs this list, and the memory model counts the kept bytes in flight from the same list.
This module uses the standard library only.
"""

import itertools
from typing import Literal, NamedTuple

from megatron_lite.config.stages import most_in_flight


class Action(NamedTuple):
    """The forward or backward of one micro-batch through one of the rank's stages.

    microbatch: the micro-batch's number in the step.
    chunk: the stage's place among those of this rank.
    """

    kind: Literal["forward", "backward"]
    microbatch: int
    chunk: int = 0


class StepOrder(NamedTuple):
    """What decides the order of a pipeline rank's actions in a step.

    size: the number of pipeline ranks.
    num_chunks: the stages of each rank.
    """

    size: int
    rank: int
    num_microbatches: int
    num_chunks: int = 1

    def actions(self) -> list[Action]:
        """Returns the rank's actions.

        The first forwards fill the pipeline. A forward and a backward follow in turn, and the
        remaining backwards come last. Raises ValueError if a rank has several stages and the number
        of micro-batches is not a multiple of the number of ranks.
        """
        forwards, backwards = self._sequences()
        # After the warm-up each forward is paired with a backward.
        warmup = most_in_flight(**self._asdict()) - 1
        steady = zip(forwards[warmup:], backwards, strict=False)
        rest = backwards[len(forwards) - warmup :]
        return [*forwards[:warmup], *itertools.chain(*steady), *rest]

    def forwards(self) -> list[Action]:
        """Returns the forwards of an evaluation, in the same order on every rank."""
        return self._sequences()[0]

    def keeping_all(self, num_kept: int) -> frozenset[Action]:
        """Returns the forwards that save all activations (2205.05198, appendix C).

        The forwards are grouped into windows as long as the number in flight on this rank. The
        first `num_kept` of each window save everything; the others follow the recompute policy.
        Later ranks have shorter windows.
        """
        window = most_in_flight(**self._asdict())
        return frozenset(
            action for number, action in enumerate(self.forwards()) if number % window < num_kept
        )

    def _sequences(self) -> tuple[list[Action], list[Action]]:
        """Returns all forwards and all backwards, each in the order in which they run.

        With several stages per rank, `size` micro-batches run through each stage in turn, and the
        next `size` follow. Backwards take the stages in reverse.
        """
        if self.num_chunks > 1 and self.num_microbatches % self.size:
            raise ValueError(
                f"{self.num_microbatches} micro-batches per step are not a multiple of "
                f"--pipeline-model-parallel-size {self.size}, as several virtual stages per rank "
                "need: change --global-batch-size, or leave the virtual stages out"
            )
        group = self.size if self.num_chunks > 1 else 1
        forwards, backwards = [], []
        for first in range(0, self.num_microbatches, group):
            for chunk in range(self.num_chunks):
                for microbatch in range(first, min(first + group, self.num_microbatches)):
                    forwards.append(Action("forward", microbatch, chunk))
                    backwards.append(Action("backward", microbatch, self.num_chunks - 1 - chunk))
        return forwards, backwards
