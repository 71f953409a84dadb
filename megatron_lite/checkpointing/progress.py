"""How far a run has come: with the weights and the random-number streams, all that resuming needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Iterations done and samples consumed; of those iterations, how many changed no weight, and how many had a NaN loss.

    evaluation_is_due: the run stopped before or in the evaluation that follows this iteration. skipped_in_a_row: how many of the
    last iterations changed no weight, without a float16 run's overflows.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    evaluation_is_due: bool = False
    skipped_in_a_row: int = 0
